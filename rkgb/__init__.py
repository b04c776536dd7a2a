"""rkgb: what a PyTorch module really computes, forward and backward, as graphs."""

from rkgb.bgraph import BGraph, BNode, Leaf, LeafKind
from rkgb.check import summary, test_rkgb
from rkgb.cut import Block, Chain, chain, cut
from rkgb.dgraph import DGraph, DNode
from rkgb.equivalence import equivalent_classes
from rkgb.errors import (
    GraphError,
    GuardError,
    ModelError,
    RecordMismatch,
    ReplayMismatch,
    RockmateError,
    SampleError,
    TraceError,
    TraceWarning,
)
from rkgb.inspection import b_to_d
from rkgb.json_form import GraphFormatError
from rkgb.kgraph import KComp, KData, KGraph, s_to_k
from rkgb.networkx_form import to_networkx
from rkgb.partition import SubGraph, partition
from rkgb.pipeline import AllGraphs, make_all_graphs
from rkgb.render import RenderError
from rkgb.sample import Sample, make_sample
from rkgb.sgraph import SGraph, SNode, d_to_s
from rkgb.show import describe, print_all_graphs, print_graph, print_graph_list
from rkgb.stages import B_to_D, D_to_S, S_list_to_K_list_eco, S_to_K, make_B
from rkgb.tracing.trace import trace
from rkgb.values import ValueInfo

__all__ = [
    "AllGraphs",
    "BGraph",
    "BNode",
    "B_to_D",
    "Block",
    "Chain",
    "DGraph",
    "DNode",
    "D_to_S",
    "GraphError",
    "GraphFormatError",
    "GuardError",
    "KComp",
    "KData",
    "KGraph",
    "Leaf",
    "LeafKind",
    "ModelError",
    "RecordMismatch",
    "RenderError",
    "ReplayMismatch",
    "RockmateError",
    "SGraph",
    "SNode",
    "S_list_to_K_list_eco",
    "S_to_K",
    "Sample",
    "SampleError",
    "SubGraph",
    "TraceError",
    "TraceWarning",
    "ValueInfo",
    "b_to_d",
    "chain",
    "cut",
    "d_to_s",
    "describe",
    "equivalent_classes",
    "make_B",
    "make_all_graphs",
    "make_sample",
    "partition",
    "print_all_graphs",
    "print_graph",
    "print_graph_list",
    "s_to_k",
    "summary",
    "test_rkgb",
    "to_networkx",
    "trace",
]
