"""The docstring of every op and plain function ends with an example, which runs and prints what it says."""
import doctest
import inspect

import pytest
import torch

import specvis_kernels

NAMES = {"torch": torch} | {name: getattr(specvis_kernels, name)
                            for name in {*specvis_kernels.__all__, *specvis_kernels.ops()}}
PLAIN = ["backends", "check_status", "gumbel_noise", "philox_uniforms", "philox_words", "tree_from_choices"]


@pytest.mark.parametrize("op", [*specvis_kernels.ops(), *PLAIN])
def test_the_example_runs(op):
    """torch and the names of specvis_kernels are imported already."""
    docstring = inspect.getdoc(NAMES[op])
    test = doctest.DocTestParser().get_doctest(docstring, dict(NAMES), op, None, 0)
    assert test.examples, f"the docstring of {op} has no example"
    assert any(f"{op}(" in example.source for example in test.examples), f"the example of {op} does not call it"
    assert any(example.want for example in test.examples), f"the example of {op} shows no result"

    last = test.examples[-1]
    end = last.lineno + (last.source + last.want).count("\n")
    assert not "".join(docstring.splitlines()[end:]).strip(), f"the docstring of {op} goes on after its example"

    report = []
    failed, _ = doctest.DocTestRunner().run(test, out=report.append)
    assert not failed, "".join(report)
