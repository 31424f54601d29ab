# SPDX-License-Identifier: Apache-2.0
"""Random candidates for pack_tree, and its rule written out in lists."""

import math

import torch


def random_trees(seed, num_requests, num_candidates, max_depth, ties=False):
    """Candidates in depth order, as expansion creates them, with falling scores along paths."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.arange(num_candidates)
    depths = (columns * max_depth // max(num_candidates, 1) + 1).int().repeat(num_requests, 1)
    parents = torch.full((num_requests, num_candidates), -1, dtype=torch.int32)
    edges = -torch.rand(num_requests, num_candidates, generator=generator)
    if ties:
        edges = (edges * 3).round() / 2
    scores = edges.clone()
    for request in range(num_requests):
        for column in range(num_candidates):
            above = (depths[request] == depths[request, column] - 1).nonzero().flatten()
            if len(above):
                pick = int(torch.randint(len(above), (1,), generator=generator))
                parents[request, column] = above[pick]
                scores[request, column] += scores[request, above[pick]]
    return scores, parents, depths


def written_out(scores, parents, depths, counts, depth_bias, n):
    """The rule in lists: the smallest score on each path, best first, then columns upwards."""
    results = []
    for request, count in enumerate(counts.tolist()):
        value, kept_mask = [], {-1: 1}
        for column in range(count):
            own = float(scores[request, column] + depth_bias[depths[request, column]])
            own = -math.inf if math.isnan(own) else own
            above = int(parents[request, column])
            value.append(own if above < 0 else min(own, value[above]))
        kept = sorted(sorted(range(count), key=lambda c: (-value[c], c))[:n])
        row_of = {-1: 0} | {column: row for row, column in enumerate(kept, 1)}
        up, level, masks = [-1], [0], [1]
        for row, column in enumerate(kept, 1):
            above = int(parents[request, column])
            kept_mask[column] = kept_mask[above] | 1 << row
            up.append(row_of[above])
            level.append(int(depths[request, column]))
            masks.append(kept_mask[column])
        pads = n - len(kept)
        no_row, level = [-1] * pads, level + [0] * pads
        numbers = masks + [0] * pads
        results.append((kept + no_row, up + no_row, level, level, numbers, len(kept)))
    return results


def as_lists(results):
    """Results of the operator in the form of `written_out`; a mask row is one whole number."""
    index, parent, depth, position, mask, count = (result.tolist() for result in results)
    rows = [[number_of(row) for row in request] for request in mask]
    return list(zip(index, parent, depth, position, rows, count, strict=True))


def number_of(words):
    """The whole number whose 32-bit digits are the words, lowest first."""
    return sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(words))
