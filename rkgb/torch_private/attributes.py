"""Private attributes of PyTorch's objects that are read or overridden where they are needed, and what for."""

from __future__ import annotations

from collections.abc import Mapping

ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "tensor": {
        "_base": "the tensor that it is a view of; None where it is none",
        "_version": "how often its storage was written into: autograd's own check. It can be raised publicly, not read",
    },
    "operation": {
        "_overloadname": '"default" where the schema has no name',
        "_overloadpacket": "all operations of its name",
        "_schema": "what it reads, writes and returns, with the names and types of its arguments",
    },
    # The dictionaries themselves, which two modules may share and which are given back as they were: the public methods
    # give copies and iterators, and cannot tell a name that holds None.
    "module": {
        "_backward_hooks": "by number",
        "_backward_pre_hooks": "by number",
        "_buffers": "by name",
        "_forward_hooks": "by number",
        "_forward_hooks_always_called": "numbers of those that are called after an error, too",
        "_forward_hooks_with_kwargs": "numbers of those that take keyword arguments",
        "_forward_pre_hooks": "by number",
        "_forward_pre_hooks_with_kwargs": "numbers of those that take keyword arguments",
        "_is_full_backward_hook": "of which of two kinds its backward hooks are",
        "_load_state_dict_post_hooks": "by number",
        "_load_state_dict_pre_hooks": "by number",
        "_modules": "by name",
        "_non_persistent_buffers_set": "names of buffers that are no part of the state",
        "_parameters": "by name",
        "_state_dict_hooks": "by number",
        "_state_dict_pre_hooks": "by number",
        "_call_impl": "what `__call__` is: calls the hooks and `forward`",
        "_compiled_call_impl": "what its method `compile` has put in the place of that; None where nobody called it",
        "_apply": "behind `to`, `cuda` and `float`: libraries override it",
        "_load_from_state_dict": "of this module alone, without its submodules: libraries override it",
        "_save_to_state_dict": "of this module alone, without its submodules: libraries override it",
        "_replicate_for_data_parallel": "makes the copies of `DataParallel`: a planned module refuses here",
    },
    "dispatch mode": {
        "_should_skip_dynamo": "whether the compiler is kept off by code around each call; PyTorch 2.9 does not ask",
    },
}
