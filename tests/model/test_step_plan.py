"""Which kernels a step launches, with every argument, planned without a GPU: compared with golden plans (`tests.model.plans`)."""

from __future__ import annotations

import pytest

from exl2nb.ops import step_plan
from tests.model import plans

pytestmark = pytest.mark.skipif(not step_plan.available(), reason="needs libexl2nb_cuda.so")


@pytest.fixture(scope="module")
def golden():
    return plans.read_golden()


@pytest.mark.parametrize("name", plans.PROGRAMS)
def test_plans_are_the_golden_ones(name, golden):
    changes = []
    for program, case in plans.PROGRAMS[name](name):
        for rows, plan in case.plans(program):
            change = golden[case.name][rows].difference(plan)
            if change:
                changes.append(f"{case.name}, {rows} rows: {change}")
    assert not changes, "\n".join([f"{len(changes)} plans changed (python -m tests.model.plans writes them anew):", *changes[:20]])


def test_the_readable_plan_is_the_golden_one():
    assert plans.readable() == plans.READABLE.read_text(), "the plan of Llama-3-8B changed (python -m tests.model.plans)"


def test_a_plan_names_the_launch_that_changed(golden):
    program = plans.ShapedProgram(plans.SHAPES["Llama-3-8B"])
    plan = step_plan.step_plan(program, 1)
    stored = golden["Llama-3-8B"][1]
    assert not stored.difference(plan)
    shorter = stored.difference(plan[:-1])
    assert shorter.startswith("6 launches instead of 7; launch 6 was persistent_gemm"), shorter
    other = stored.difference([*plan[:2], step_plan.PlannedLaunch(2, plan[2].kernel, "grid 1", ""), *plan[3:]])
    assert "in launch 2" in other, other


def test_a_program_of_the_gpu_is_not_changed_by_planning():
    program = plans.ShapedProgram(plans.SHAPES["TinyLlama-1.1B"])
    once = step_plan.step_plan(program, 5)
    step_plan.step_plan(program, 64, lora_width=16)
    assert step_plan.step_plan(program, 5) == once, "a plan depends on the plan before it"
