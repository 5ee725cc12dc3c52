"""Layout: where the bytes of a KV cache lie, and which of them go where.

Values in, arrays out; needs numpy and attrs and nothing else of kvxfer but its errors.  Describe
both sides' caches (``KVLayout``, ``StateLayout``), say which blocks a request holds (``Blocks``),
and plan (``plan_blocks``, ``plan_layers``).
"""

from kvxfer.core.layout._cutting import Borders
from kvxfer.core.layout.blocks import Blocks, TokenShare
from kvxfer.core.layout.cache import PlanCache
from kvxfer.core.layout.descriptors import DescriptorTable
from kvxfer.core.layout.fill import uncovered_ranges, zero_ranges
from kvxfer.core.layout.fingerprint import Fingerprint, geometry_digest
from kvxfer.core.layout.groups import GroupKind, GroupSpec, block_groups, prompt_is_computed
from kvxfer.core.layout.heads import HeadSlice
from kvxfer.core.layout.kv import KVLayout, LayoutKind
from kvxfer.core.layout.layers import LayerPair, LayerRef, Layers, match_layers
from kvxfer.core.layout.layerwise import plan_layers
from kvxfer.core.layout.paired import LayersPlan, PairedPlan, PlanGroup
from kvxfer.core.layout.plan import Plan, Uncovered
from kvxfer.core.layout.planner import plan_blocks
from kvxfer.core.layout.rule import Align, Side
from kvxfer.core.layout.state import Sharding, StateLayout, StatePart
from kvxfer.core.layout.tally import LayerTally
from kvxfer.core.layout.tensors import KVSpec, TokenOrder

__all__ = [
    "Align",
    "Blocks",
    "Borders",
    "DescriptorTable",
    "Fingerprint",
    "GroupKind",
    "GroupSpec",
    "HeadSlice",
    "KVLayout",
    "KVSpec",
    "LayerPair",
    "LayerRef",
    "LayerTally",
    "Layers",
    "LayersPlan",
    "LayoutKind",
    "PairedPlan",
    "Plan",
    "PlanCache",
    "PlanGroup",
    "Sharding",
    "Side",
    "StateLayout",
    "StatePart",
    "TokenOrder",
    "TokenShare",
    "Uncovered",
    "block_groups",
    "geometry_digest",
    "match_layers",
    "plan_blocks",
    "plan_layers",
    "prompt_is_computed",
    "uncovered_ranges",
    "zero_ranges",
]
