# SPDX-License-Identifier: Apache-2.0
# A stand-in for CANN's file of this name: kernels are built for the emulator, and launched as CANN's
# own ascendc_library has it, by functions aclrtlaunch_NAME of generated headers. ../cann.py says
# where STANDIN and EMULATOR are.

function(ascendc_library library type)
  set(generated ${CMAKE_BINARY_DIR}/${library})
  execute_process(
    COMMAND ${STANDIN_PYTHON} ${STANDIN}/host_stub.py ${generated} ${ARGN}
    RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "host_stub.py failed")
  endif()
  file(GLOB stubs ${generated}/*.cpp)
  add_library(${library} ${type} ${stubs} ${EMULATOR}/runtime/runtime.cpp)
  target_include_directories(${library} PRIVATE
    ${STANDIN} ${EMULATOR}/include ${EMULATOR}/..)
  target_include_directories(${library} INTERFACE ${generated})
  # As npu_ops/emulator/build.py has them.
  target_compile_options(${library} PRIVATE -O1 -fno-exceptions -fno-rtti -fvisibility=hidden
    -fwrapv -fno-strict-aliasing -ffp-contract=off)
  target_link_libraries(${library} INTERFACE ascendcl)
endfunction()

function(ascendc_include_directories library scope)
  target_include_directories(${library} ${scope} ${ARGN})
endfunction()
