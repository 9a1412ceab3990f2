"""The page for those who come from brainstate names all there is, and what there is."""

import re
from pathlib import Path

import eqloop as el
from eqloop import ir

PAGE = Path(__file__).parents[2] / "docs/coming_from/brainstate.md"

# The names of `brainstate.transform` 0.5.4, but for those of its checkify's sets of
# checks, and for `sofo_grad`, which its documentation has as well.
NAMES = re.findall(
    r"\w+",
    """
    GradientTransform ProgressBar StateFinder StatefulFunction StatefulMapping
    algebraic_simplification bounded_while_loop breakpoint_if check check_error
    checkify checkpoint checkpointed_for_loop checkpointed_scan
    common_subexpression_elimination cond constant_fold copy_propagation
    dead_code_elimination debug_nan debug_nan_if draw draw_dot_graph
    eqns_to_closed_jaxpr eqns_to_jaxpr eval_shape fn_to_python_code for_loop fwd_grad
    grad hessian ifelse in_new_state_probe inline_jit jacfwd jacobian jacrev
    jaxpr_to_python_code jit jit_error_if jvp make_jaxpr map named_call named_scope
    optimize_jaxpr pmap2 pmap2_new_states register_prim_handler remat scan shard_map
    sofo_grad switch unvmap vector_grad view_pydot vjp vmap vmap2 vmap2_new_states
    vmap_new_states while_loop
    """,
)


def rows():
    """The first and the second column of all tables."""
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            _, theirs, ours, _ = line.split("|")
            yield theirs, ours


def test_no_name_is_missing():
    listed = {name for theirs, _ in rows() for name in re.findall(r"`(\w+)`", theirs)}
    assert set(NAMES) <= listed


def test_counterparts_exist_and_have_an_example():
    _, *examples = PAGE.read_text().split("```python")
    code = "".join(example.split("```")[0] for example in examples)
    rooms = {"el": el, "ir": ir}
    for _, ours in rows():
        for room, name in re.findall(r"`(el|ir)\.(\w+)", ours):
            assert hasattr(rooms[room], name)
            assert f"{room}.{name}" in code
