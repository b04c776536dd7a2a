"""rkgb: what a PyTorch module really computes, forward and backward, as graphs."""

from rkgb.capture.trace import trace
from rkgb.check import summary, test_rkgb
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
from rkgb.export import json_form
from rkgb.export.json_form import GraphFormatError
from rkgb.export.networkx_form import to_networkx
from rkgb.export.render import RenderError
from rkgb.ir.bgraph import BGraph, BNode, Leaf, LeafKind
from rkgb.ir.blocks import Block, Chain
from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.kgraph import KComp, KData, KGraph
from rkgb.ir.sample import Sample, make_sample
from rkgb.ir.sgraph import SGraph, SNode
from rkgb.ir.values import ValueInfo
from rkgb.passes.b_to_d import b_to_d
from rkgb.passes.cut import chain, cut
from rkgb.passes.d_to_s import d_to_s
from rkgb.passes.equivalence import equivalent_classes
from rkgb.passes.partition import SubGraph, partition
from rkgb.passes.s_to_k import s_to_k
from rkgb.pipeline import AllGraphs, make_all_graphs
from rkgb.show import describe, print_all_graphs, print_graph, print_graph_list
from rkgb.stages import B_to_D, D_to_S, S_list_to_K_list_eco, S_to_K, make_B

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
    "json_form",
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
