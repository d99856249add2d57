"""The docstring of every op, plain function and function of other decoders ends with an example, which runs."""
import doctest
import inspect

import pytest
import torch

import specvis_kernels
from specvis_kernels.compat import sglang, transformers, vllm

NAMES = {"torch": torch} | {name: getattr(specvis_kernels, name)
                            for name in {*specvis_kernels.__all__, *specvis_kernels.ops()}}
PLAIN = ["backends", "check_status", "gumbel_noise", "philox_words", "tree_from_choices", "tree_from_mask",
         "tree_from_paths", "tree_paths"]
COMPAT = [sglang.tree_speculative_sampling_target_only, sglang.verify_tree_greedy, sglang.build_tree_kernel_efficient,
          vllm.rejection_sample, vllm.probabilistic_rejection_sample, transformers.tree_generate,
          transformers.jacobi_generate, transformers.GuidedProbsProcessor]


@pytest.mark.parametrize("function", [*(NAMES[op] for op in [*specvis_kernels.ops(), *PLAIN]), *COMPAT],
                         ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_the_example_runs(function):
    """torch and the names of specvis_kernels are imported already, but not for a function of other decoders."""
    if function.__module__ == transformers.__name__:
        pytest.importorskip("transformers")
    docstring, op = inspect.getdoc(function), function.__name__
    test = doctest.DocTestParser().get_doctest(docstring, {} if function in COMPAT else dict(NAMES), op, None, 0)
    assert test.examples, f"the docstring of {op} has no example"
    assert any(f"{op}(" in example.source or f"={op}" in example.source for example in test.examples), (
        f"the example of {op} does not call it")
    assert any(example.want for example in test.examples), f"the example of {op} shows no result"

    last = test.examples[-1]
    end = last.lineno + (last.source + last.want).count("\n")
    assert not "".join(docstring.splitlines()[end:]).strip(), f"the docstring of {op} goes on after its example"

    report = []
    failed, _ = doctest.DocTestRunner().run(test, out=report.append)
    assert not failed, "".join(report)
