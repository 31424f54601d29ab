# SPDX-License-Identifier: Apache-2.0
"""The paper's methods: one drafter protocol, one builder of trees, and what each sets of them.

Every method drafts as deep as its drafter does. Sources: algorithms 3.1 (TreeSpark, DSpark+Tree),
3.6 (chains), 3.7 (confidence threshold), 4.1 (calibrated), 4.2 (DDTree), 4.3 (the axes).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treespark.bench.methods import AUTOREGRESSIVE
from treespark.bench.suite_records import MethodRow
from treespark.drafter.growing import Growth
from treespark.errors import UsageError
from treespark.serving.checks import check_drafter, default_policy
from treespark.tree.builder import BUDGET, MARGINAL, SURVIVAL, THRESHOLD, TreeBuilder
from treespark.tree.policy import MAX_BRANCHING, TreePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from treespark.bench.suite_recipe import MethodSection
    from treespark.drafter.auto import Drafter
    from treespark.target.model import TargetModel

CHAIN, TREE = "chain", "tree"


@dataclass(frozen=True)
class Preset:
    """What a method is unless its section says otherwise.

    axes: of its `TreeBuilder`.  branching, budget: None takes the drafter's own.
    """

    title: str
    kind: str
    axes: Mapping[str, str] = field(default_factory=dict)
    branching: int | None = None
    budget: int | None = None
    min_confidence: float = 0.0


# Zhou et al. (algorithms 4.1): 8 children per node, at most 64 nodes.
BRANCH_CAP, NODE_CAP = 8, 64
# Ours: DeepSpec's evaluator, which has the option, cuts nothing unless it is told to.
_MIN_CONFIDENCE = 0.5
PRESETS = {
    AUTOREGRESSIVE: Preset("Autoregressive", AUTOREGRESSIVE),
    "eagle3": Preset("EAGLE-3", CHAIN),
    "dflash": Preset("DFlash", CHAIN, {"proposal": MARGINAL}),
    "dspark": Preset("DSpark", CHAIN),
    "dspark-threshold": Preset("DSpark (threshold)", CHAIN, min_confidence=_MIN_CONFIDENCE),
    "dspark-tree": Preset("DSpark+Tree", TREE),
    "treespark": Preset("TreeSpark", TREE),
    # As many children as nodes: with fewer it would not be the best of all prefixes.
    "ddtree": Preset("DDTree", TREE, {"proposal": MARGINAL, "stop": BUDGET}, MAX_BRANCHING),
    "calibrated": Preset(
        "Calibrated", TREE, {"priority": SURVIVAL, "stop": THRESHOLD}, BRANCH_CAP, NODE_CAP
    ),
    "best-first": Preset("Best-first", TREE, {"stop": BUDGET}, BRANCH_CAP),
}
# Least survival of a node by requests at a time, greedy decoding (algorithms 4.1).
_LADDER = ((4, 0.02), (8, 0.05))
_LADDER_END = 0.15


@dataclass(frozen=True)
class SuiteMethod:
    """One method, ready for an engine.

    by_load: its threshold is the published one for the requests that run at a time.
    """

    row: MethodRow
    drafter: Drafter | None
    policy: TreePolicy
    growth: Growth
    by_load: bool = False

    def growth_at(self, concurrency: int) -> Growth:
        """Return how drafts grow while `concurrency` requests run at a time."""
        if not self.by_load:
            return self.growth
        steps = [threshold for largest, threshold in _LADDER if concurrency <= largest]
        threshold = steps[0] if steps else _LADDER_END
        builder = dataclasses.replace(self.growth.builder, threshold=threshold)
        return dataclasses.replace(self.growth, builder=builder)


def suite_method(
    section: MethodSection, drafters: Mapping[str, Drafter], target: TargetModel
) -> SuiteMethod:
    """Return the method of a recipe's section.

    Raises UsageError, begun by the method's name, for options that do not go together, for a
    missing drafter and for one that cannot draft like this.
    """
    try:
        return _resolved(section, drafters, target)
    except UsageError as problem:
        # Options of the command line are keys here.
        raise UsageError(f"method {section.name}: {str(problem).removeprefix('--')}") from None


def _resolved(
    section: MethodSection, drafters: Mapping[str, Drafter], target: TargetModel
) -> SuiteMethod:
    name = section.method or section.name
    if name not in PRESETS:
        raise UsageError(f"need `method`, one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    title = section.title or (preset.title if section.method is None else section.name)
    if preset.kind == AUTOREGRESSIVE:
        _refuse_options(section)
        row = MethodRow(name=section.name, title=title, kind=AUTOREGRESSIVE, method=name)
        return SuiteMethod(row, None, TreePolicy(budget=0), Growth())
    if section.drafter is None:
        raise UsageError(f"needs `drafter`, one of {', '.join(drafters) or '`drafters`'}")
    drafter = drafters[section.drafter]
    if (name == "eagle3") != (drafter.config.model_type == "treespark_eagle3"):
        kinds = "an EAGLE-3 drafter" if name == "eagle3" else "a block drafter"
        raise UsageError(f"drafter {section.drafter} is {drafter.config.model_type}; need {kinds}")
    policy = _policy(section, preset, drafter)
    growth, by_load = _growth(section, preset)
    check_drafter(target, drafter, policy)
    growth.check(drafter, policy)
    row = _row(section, title, name, policy, growth, by_load, drafter)
    return SuiteMethod(row, drafter, policy, growth, by_load)


def _refuse_options(section: MethodSection) -> None:
    given = section.model_fields_set - {"name", "method", "title"}
    if given:
        raise UsageError(f"{min(given)}: not an option of autoregressive decoding")


def _policy(section: MethodSection, preset: Preset, drafter: Drafter) -> TreePolicy:
    own = default_policy(drafter)
    depth = section.depth or own.depth
    if preset.kind == CHAIN:
        for option in ("branching", "budget", "frontier"):
            if getattr(section, option) is not None:
                raise UsageError(f"{option} {getattr(section, option)}: a chain has none")
        return TreePolicy(depth, 1, depth)
    # A drafter that was trained as a chain has a budget of one node per depth.
    grown = own.budget if own.branching > 1 else TreePolicy().budget
    budget = section.budget if section.budget is not None else preset.budget or grown
    children = own.branching if own.branching > 1 else TreePolicy().branching
    branching = section.branching or preset.branching or children
    if preset.axes.get("proposal") == MARGINAL and section.branching is None:
        branching = max(1, min(branching, budget))
    return TreePolicy(depth, branching, budget, section.frontier)


def _growth(section: MethodSection, preset: Preset) -> tuple[Growth, bool]:
    """Return how the method grows, and whether its threshold follows the load."""
    options: dict[str, Any] = dict(preset.axes)
    for option in ("proposal", "priority", "stop", "threshold", "alpha", "beta"):
        if getattr(section, option) is not None:
            options[option] = getattr(section, option)
    by_load = options.get("stop") == THRESHOLD and options.get("threshold") is None
    if by_load:
        options["threshold"] = _LADDER[0][1]
    confidence = section.min_confidence or preset.min_confidence
    return Growth(TreeBuilder(**options), confidence), by_load


def _row(
    section: MethodSection,
    title: str,
    name: str,
    policy: TreePolicy,
    growth: Growth,
    by_load: bool,
    drafter: Drafter,
) -> MethodRow:
    builder, options = growth.builder, {}
    if builder.priority == SURVIVAL:
        options |= {"alpha": builder.alpha, "beta": builder.beta}
    if builder.threshold is not None and not by_load:
        options["threshold"] = builder.threshold
    if growth.min_confidence:
        options["min_confidence"] = growth.min_confidence
    shifted = getattr(drafter.config, "anchor_predicts_next", None)
    return MethodRow(
        name=section.name,
        title=title,
        kind=CHAIN if policy.branching == 1 else TREE,
        method=name,
        drafter=section.drafter,
        proposal=builder.proposal,
        priority=builder.priority,
        stop=builder.stop,
        depth=policy.depth,
        branching=policy.branching,
        budget=policy.budget,
        frontier=builder.shape(policy).frontier_width,
        layout=None if shifted is None else "shifted" if shifted else "in-place",
        options=options,
    )
