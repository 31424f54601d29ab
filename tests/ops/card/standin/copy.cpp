// SPDX-License-Identifier: Apache-2.0
// A stand-in for the one built-in operator that the operators' binding needs: the copy behind
// Tensor.contiguous(), which torch_npu finds in libopapi.
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct View {
  std::vector<int64_t> sizes, strides;
  char* data;
};

struct Copy {
  View target, source;
};

size_t BytesOf(int type) {
  switch (type) {  // aclDataType
    case 0:        // float
    case 3:        // int32
      return 4;
    case 1:   // float16
    case 27:  // bfloat16
      return 2;
    default:
      return 0;
  }
}

// Copies element by element, the last axis innermost.
void Run(const Copy& copy, size_t axis, const char* source, char* target, size_t bytes) {
  if (axis == copy.target.sizes.size()) {
    std::memcpy(target, source, bytes);
    return;
  }
  for (int64_t i = 0; i < copy.target.sizes[axis]; ++i) {
    Run(copy, axis + 1, source + i * copy.source.strides[axis] * static_cast<int64_t>(bytes),
        target + i * copy.target.strides[axis] * static_cast<int64_t>(bytes), bytes);
  }
}

}  // namespace

struct aclTensor {
  View view;
  size_t item;
};

struct aclOpExecutor {
  Copy copy;
  size_t item;
};

extern "C" {

aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t rank, int type, const int64_t* strides,
                           int64_t offset, int, const int64_t*, uint64_t, void* data) {
  const size_t item = BytesOf(type);
  if (item == 0) return nullptr;
  const View view = {{sizes, sizes + rank},
                     {strides, strides + rank},
                     static_cast<char*>(data) + offset * static_cast<int64_t>(item)};
  return new aclTensor{view, item};
}

int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return 0;
}

int aclnnInplaceCopyGetWorkspaceSize(aclTensor* target, const aclTensor* source, uint64_t* bytes,
                                     aclOpExecutor** executor) {
  if (!target || !source || target->item != source->item ||
      target->view.sizes != source->view.sizes) {
    return 161002;  // ACLNN_ERR_PARAM_INVALID
  }
  *bytes = 0;
  *executor = new aclOpExecutor{{target->view, source->view}, target->item};
  return 0;
}

int aclnnInplaceCopy(void*, uint64_t, aclOpExecutor* executor, void*) {
  const Copy& copy = executor->copy;
  Run(copy, 0, copy.source.data, copy.target.data, executor->item);
  delete executor;
  return 0;
}
}
