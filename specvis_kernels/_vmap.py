"""What torch.func.vmap does with the ops: one call with a larger batch, if the op has a batch."""
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

TABLES = {"neighbors"}  # arguments that all requests share, whatever the batch


def batching_rule(op, batch: str | None, written: list[int]):
    """The rule of an op, for torch.library.register_vmap.

    The mapped dimension becomes part of B, and tensors that are not mapped are repeated. A tensor may lead with a
    multiple of B, row r belonging to request r % B. Where the op has no batch, or a table that all requests share is
    mapped, the op is called in a loop.

    Args:
        op:       an overload
        batch:    the argument whose first size is B, "" for the first one; None: no tensor leads with B
        written:  the positions of the arguments that it writes to
    """
    names = [argument.name for argument in op._schema.arguments]

    def rule(info, in_dims, *args):
        S = info.batch_size
        given = [i for i in written if args[i] is not None]
        for i in given:
            if None in tree_leaves(in_dims[i], is_leaf=lambda dim: dim is None):
                raise ValueError(f"{names[i]} must be mapped like the other arguments, "
                                 f"because {op._schema.name.partition('::')[2]} writes to it")
        if batch is None or any(name in TABLES and dim is not None for name, dim in zip(names, in_dims)):
            return loop(S, in_dims, args)
        at = names.index(batch or names[0])
        B = args[at].shape[0] if in_dims[at] is None else args[at].movedim(in_dims[at], 0).shape[1]

        def fold(x, dim):  # (S, k * B, ..) -> (k * S * B, ..)
            x = x.expand(S, *x.shape) if dim is None else x.movedim(dim, 0)
            k = x.shape[1] // B if B else 1
            return x.unflatten(1, (k, B)).transpose(0, 1).flatten(0, 2).contiguous()

        def unfold(x):
            k = x.shape[0] // (S * B) if S * B else 1
            return x.unflatten(0, (k, S, B)).transpose(0, 1).flatten(1, 2)

        folded = [fold(x, dim) if isinstance(x, Tensor) and name not in TABLES else x
                  for name, x, dim in zip(names, args, in_dims)]
        outputs = op(*folded)
        for i in given:
            args[i].movedim(in_dims[i], 0).copy_(unfold(folded[i]))
        outputs = tree_map(unfold, outputs)
        return outputs, tree_map(lambda _: 0, outputs)

    def loop(S, in_dims, args):
        outputs = []
        for s in range(S):
            leaves, spec = tree_flatten(args)
            dims = tree_leaves(in_dims, is_leaf=lambda dim: dim is None)
            slices = [x if dim is None else x.select(dim, s) for x, dim in zip(leaves, dims)]
            own = [x.contiguous() if isinstance(x, Tensor) else x for x in slices]  # written ones are already
            outputs.append(op(*tree_unflatten(own, spec)))
        outputs = tree_map(lambda *each: torch.stack(each), *outputs)
        return outputs, tree_map(lambda _: 0, outputs)

    return rule
