"""Elements that indices choose: `x[y]`, `torch.gather`, and the row that is 1 at an index.

Of what is computed elementwise from arguments only the element is computed, and one element of each
argument is loaded. Of anything else the element is the largest of a row that holds it at its place
and -inf elsewhere, so it keeps its bits, and what other places hold does not show.

A few indices are taken one by one. More than 64, and those that a whole row holds, are a row of
indices: they choose a row of elements (`places.gathered`), which only works for what is computed
elementwise from arguments, or they choose among the elements of a short row.
"""

from __future__ import annotations

from math import prod

import torch

from ..errors import DtypeError, ShapeError, UnsupportedError
from .composites import INF, NAN
from .dtypes import FLOAT8, STORAGE
from .factories import index
from .functions import implements, where
from .graph import Builder, Node
from .joins import cat, repeat_interleave, stack
from .ops import COLLECTIVES, Op, Varies
from .parts import MOST_PARTS, part, too_many, with_one_ellipsis
from .parts import getitem as _getitem
from .places import MOST_TAKEN, at_one, gathered, wide
from .promotion import BOOL, FLOAT, INT64, cast, convert, scalar
from .returned import note_table
from .shapes import axis_of, fixed, has_any_length, reshaped, unsqueeze
from .tensor import FUNCTIONS, Tensor, alias, fail, is_real, node

# Of a matrix of more than FEW_ROWS rows all elements are compared with the indices of their row, of
# which there are MOST_EACH at most: each takes some instructions for every element. With MOST_PARTS
# indices or fewer, rows longer than SHORT are not compared: an element may be loaded alone.
FEW_ROWS, MOST_EACH, SHORT = 8, 8, 64
SMALLEST_GROUP = 8  # of columns that share an element; a choice for each costs less in others
LEAST_TOGETHER = 8  # indices of a row, one for each column, that are looked up together


def element(x: Tensor, y: Tensor | int, wraps: bool = False) -> Tensor:
    """The element of a row at the index `y`, an integer or one a row; its shape is that of `y`.

    wraps: whether a negative index counts from the end. Beyond the end the result is NaN, of
        integers 0, and of masks False.
    """
    v, n = x._value, x.shape[-1]
    if v.dtype in STORAGE:
        return cast(element(wide(x), y, wraps), v.dtype)
    is_known = not isinstance(y, Tensor)
    if is_known:
        y = y + n if wraps and y < 0 else y
    elif wraps:
        y = where(y < 0, y + n, y)
    taken = None
    if x._later is not None:  # it may have a way of its own
        taken = x._later(Op.TAKE, (x, y), None)
    if taken is None and not is_known:
        taken = at_one(x, y)
    here = index(x._builder, x._sizes[-1]) == y if taken is None else None
    if taken is not None:
        found = taken
    elif v.dtype is BOOL:
        found = node(Op.ANY, here & x)
    elif v.dtype is FLOAT:
        found = node(Op.MAX, where(here, x, -INF))
    else:
        found = node(Op.SUM, where(here, x, 0))
    if not is_known and y.ndim:
        found = node(Op.RESHAPE, found, arg=(1,))
    if not is_known and (v.dtype is FLOAT or taken is not None):
        beyond = {FLOAT: NAN, BOOL: False}.get(v.dtype, 0)
        found = where((y >= 0) & (y < n), found, beyond)
    return found if v.stored is None or found._value.stored is v.stored else cast(found, v.stored)


def _shared_vector(y: Tensor) -> str | None:
    """The argument that indices come of, if all rows share it."""
    if y._value.varies is not Varies.SHARED:
        return None
    found = [y._builder[id] for id in sorted(y._builder.behind(y._id))]
    shared = [n.arg for n in found if n.op is Op.INPUT and n.value.varies is Varies.SHARED]
    return shared[0] if shared else None


def per_row_index(y: object, what: str) -> Tensor:
    """`y`, which must be an integer of each row."""
    _integers(y, what)
    v = y._value
    if y.ndim > 1:
        shape = tuple(y._sizes)
        fail(ShapeError, f"{what} by indices of shape {shape}: they have one axis at most")
    if prod(v.inner) > 1:
        count = "the" if has_any_length(y, -1) else prod(v.inner)
        fail(UnsupportedError, f"{what} by {count} indices of a row: more than {MOST_PARTS} are "
             f"taken only of a row that is computed elementwise from arguments, by {MOST_TAKEN} "
             "operations or fewer, and not of joined or padded rows, of a scan, "
             "a matrix or a row of any length: take them outside of the function, or write "
             "torch.where(torch.arange(x.shape[-1]) == y, a, b) for a choice between rows"
             )  # fmt: skip
    return y


def _integers(y: Tensor, what: str) -> Tensor:
    """`y`, which must have the dtype of indices."""
    v = y._value
    if v.dtype is BOOL:
        fail(UnsupportedError, f"{what} by a mask has no fixed length: write "
             "torch.where(mask, x, 0.0), and count with mask.sum()")  # fmt: skip
    if v.dtype is torch.uint8 and what.startswith("indexing"):
        fail(DtypeError, f"{what} by uint8, which torch takes for a mask: write y.long() for an "
             "index, and torch.where(y != 0, x, 0.0) for a mask")  # fmt: skip
    if v.dtype in STORAGE or v.dtype is FLOAT:
        fail(DtypeError, f"{what} by {str(y.dtype).removeprefix('torch.')}: an index is an "
             "integer, write y.long()")  # fmt: skip
    return y


def getitem(x: Tensor, index: object) -> Tensor:
    """`x[y]` of a row, where `y` has integers, one or more of each row; negative ones count back.

    Beyond the end the result is NaN, of integers 0, and of masks False. Numbers, slices and masks
    are as `htile.frontend.parts.getitem` has them.
    """
    parts = with_one_ellipsis(x, index) if isinstance(index, tuple) else (index,)
    rest = [p for p in parts if p is not Ellipsis]
    if len(rest) == 1 and type(rest[0]) is int and x.ndim == 1 and has_any_length(x, -1):
        return _of_any_length(x, rest[0], index)
    if any(type(p) is list for p in parts):
        each, axis = each_of_lists(x, parts)
        return stack([getitem(x, one) for one in each], axis)
    if len(rest) != 1 or not isinstance(rest[0], Tensor) or rest[0]._value.dtype is BOOL:
        return _getitem(x, parts if isinstance(index, tuple) else index)
    y = rest[0]
    _of_row(x, -1, "indexing")
    found = _elements(x, y.reshape(-1) if y.ndim > 1 else y, "indexing a row", wraps=True)
    return found.reshape(y.shape) if y.ndim > 1 else found


def listed(index: object) -> object:
    """An index with lists and numbers for the tensors whose integers are known while tracing.

    These are `torch.tensor([2, 0])`, and what torch itself computes, as `torch.tril_indices` does.
    """
    if isinstance(index, tuple):
        several = sum([isinstance(each, Tensor) for each in index]) > 1
        return tuple([_counted(each) if several else listed(each) for each in index])
    if not isinstance(index, torch.Tensor) or index.ndim > 1:
        return index
    if is_real(index):
        return index.tolist() if index.dtype in (torch.int32, INT64) else index
    known = _known(index._builder, index._id) if isinstance(index, Tensor) else None
    return index if known is None else known if index.ndim else known[0]


def _counted(index: object) -> object:
    """`listed`, of the indices `torch.arange(n)` too, which give a diagonal beside others."""
    each = index._builder[index._id] if isinstance(index, Tensor) else None
    is_counted = each is not None and each.op is Op.INDEX and each.arg <= MOST_PARTS
    return [*range(each.arg)] if is_counted else listed(index)


def _known(builder: Builder, id: int) -> list[int] | None:
    """The integers that a value joins; None of a value that the graph computes."""
    each = builder[id]
    if each.value.dtype not in (torch.int32, INT64):
        return None
    if each.op is Op.CONST and prod(each.value.inner) == 1:
        return [each.arg]
    if each.op not in (Op.RESHAPE, Op.CAT):
        return None
    found = [_known(builder, i) for i in each.inputs]
    return None if None in found else [place for places in found for place in places]


def each_of_lists(x: Tensor, parts: tuple) -> tuple[list[tuple], int]:
    """An index in which some parts are lists of places, as one index for each of the places.

    The second result is the axis of `x[parts]` that they lie along, as in torch: in place of the
    lists where these are of neighbouring axes, and the first one elsewhere.
    """
    lists = [each for each in parts if type(each) is list]
    for each in lists:
        if {type(k) for k in each} != {int}:
            _getitem(x, each)  # it refuses them
    counts, taken = {len(each) for each in lists}, sum(p is not None for p in parts)
    if len(counts - {1}) > 1:
        told = " and ".join(map(str, lists))
        fail(ShapeError, f"indexing with {told}: lists of several axes have as many places each")
    ellipses = [k for k, each in enumerate(parts) if each is Ellipsis]
    at = ellipses[0] if ellipses else len(parts)
    if taken - len(ellipses) > x.ndim:
        fail(ShapeError, too_many(taken - len(ellipses), x))
    whole = (slice(None),) * (x.ndim - taken + len(ellipses))
    axes = [p for p in (*parts[:at], *whole, *parts[at + 1 :]) if type(p) is not int]
    found = [k for k, each in enumerate(axes) if type(each) is list]
    are_neighbours = found[-1] - found[0] == len(found) - 1
    each = [tuple([p[k % len(p)] if type(p) is list else p for p in parts])
            for k in range(max(counts))]  # fmt: skip
    return each, found[0] if are_neighbours else 0


def _of_any_length(x: Tensor, place: int, index: object) -> Tensor:
    """The element at a place of a row of any length; calls with shorter rows are refused."""
    x._builder.least = max(x._builder.least, place + 1 if place >= 0 else -place)
    found = alias(x, element(x, scalar(x, place, INT64), wraps=place < 0))
    found._part_of = x, index
    return found


Tensor.__getitem__ = getitem


def _of_row(input: Tensor, dim: object, what: str) -> None:
    if dim is not None:
        axis_of(input, dim)
    if input.ndim != 1:
        fail(ShapeError, f"{what} of a value of shape {tuple(input._sizes)}: it takes an "
             "element of a row")  # fmt: skip


@implements("gather")
def gather(input, dim, index, *, sparse_grad=False):
    """The elements at indices of each row; negative ones are beyond the end.

    index: integers of shape (k,) or (), which is the result's shape too. k is at most 64 where
    input is not computed elementwise from arguments. Of a matrix they are (rows, k) along the last
    axis, k at most 8 or rows * k at most 64, or (k, columns) along the first. Beyond the end the
    result is NaN, of integers 0, and of masks False; torch raises there. Of more than 8 rows an
    element of -0.0 may become 0.0.
    """
    if input.ndim == 2 and isinstance(index, Tensor) and index.ndim == 2:
        return _of_matrix(input, axis_of(input, dim), index, "gather", wraps=False)
    _of_row(input, dim, "gather")
    return _elements(input, index, "gather", wraps=False)


def _of_matrix(x: Tensor, axis: int, index: Tensor, what: str, wraps: bool) -> Tensor:
    """Elements at a few indices of each row of a matrix, or of each column along its first axis.

    Of few rows each element is found by itself, so that it may be loaded alone.
    """
    if axis == -2:
        return _of_matrix(x.T, -1, index.T, what, wraps).T
    rows, each = index._sizes
    if rows > x._sizes[0]:
        fail(ShapeError, f"{what} of a value of shape {tuple(x._sizes)} by indices of shape "
             f"{tuple(index._sizes)}: there are no more rows of these")  # fmt: skip
    is_many = rows * each > MOST_PARTS
    if rows > FEW_ROWS and each <= MOST_EACH and (is_many or x._sizes[-1] <= SHORT):
        index = convert(_integers(index, what), INT64)
        found = [_of_all_rows(x[:rows], index[:, k : k + 1], wraps) for k in range(each)]
        return cat(found, -1)
    if is_many:
        fail(UnsupportedError, f"{what} by {rows * each} indices of a matrix: at most {MOST_PARTS} "
             f"are taken, one by one, or {MOST_EACH} of each of more than {FEW_ROWS} rows; a "
             "choice between elements is torch.where(torch.arange(x.shape[-1]) == i, x, 0.0)"
             )  # fmt: skip
    return stack([_elements(_getitem(x, k), _getitem(index, k), what, wraps) for k in range(rows)])


def _as_many(x: Tensor, y: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Two matrices, of which one is repeated along an axis that it has one element of."""
    sizes = [each._sizes[axis] for each in (x, y)]
    if sizes[0] != sizes[1] and 1 not in sizes:
        fail(ShapeError, f"take_along_dim of a value of shape {tuple(x._sizes)} by indices of "
             f"shape {tuple(y._sizes)}: the other axis has as many elements, or one")  # fmt: skip
    size = max(sizes)
    shape = (size, -1) if axis == -2 else (-1, size)
    return tuple([each if each._sizes[axis] == size else each.expand(shape) for each in (x, y)])


def _of_all_rows(x: Tensor, y: Tensor, wraps: bool) -> Tensor:
    """The element of each row of a matrix at the row's own index, int64, of shape (rows, 1).

    It is a sum with zeros, so that its gradient goes to this element alone, whatever its value is.
    An element of -0.0 becomes 0.0.
    """
    v, n = x._value, x._sizes[-1]
    if v.dtype in STORAGE:
        return cast(_of_all_rows(wide(x), y, wraps), v.dtype)
    if wraps:
        y = where(y < 0, y + n, y)
    here = index(x._builder, n) == y
    if v.dtype is BOOL:
        return (here & x).any(-1, keepdim=True)
    found = where(here, x, 0).sum(-1, keepdim=True)
    if v.dtype is FLOAT:
        found = where((y >= 0) & (y < n), found, NAN)
    dtype = v.stored or v.dtype
    return found if found._value.dtype is dtype else cast(found, dtype)


@implements("take_along_dim")
def take_along_dim(input, indices, dim=None):
    """The elements at indices of each row, int64; negative ones count from the end.

    indices: of shape (k,), with k as for `gather`; of a matrix as for `gather`, too, whose other
    axis has as many elements, or one for all. Beyond the end the result is as that of `gather`.
    """
    indices = int64(indices, "take_along_dim")
    if dim is not None and input.ndim == indices.ndim == 2:
        axis = axis_of(input, dim)
        input, indices = _as_many(input, indices, -3 - axis)
        return _of_matrix(input, axis, indices, "take_along_dim", wraps=True)
    _of_row(input, dim, "take_along_dim")
    if not indices.ndim:
        fail(ShapeError, "take_along_dim takes indices with an axis: write y[..., None]")
    return _elements(input, indices, "take_along_dim", wraps=True)


@implements("take")
def take(input, index):
    """The elements at integers of each row, of all of input; negative ones count from the end."""
    return getitem(reshaped(input, (input._sizes.numel(),)), int64(index, "take"))


def _elements(x: Tensor, y: Tensor, what: str, wraps: bool) -> Tensor:
    """The elements of a row at one index, at each of a few, or at each of many."""
    if (found := _of_groups(x, y)) is not None:
        return found
    is_many = prod(y._sizes) > MOST_PARTS or _is_of_columns(x, y)
    name = _shared_vector(y) if y.ndim == 1 and y._sizes[0] > 1 else None
    if name is not None:  # indices that all rows share, or labels without their annotation
        is_of_columns = y._sizes[0] == y._builder.n > x._sizes[0]
        if name not in y._builder.declared and not is_of_columns:
            fail(ShapeError, f"{what} by {name}, of which all rows share the {y._sizes[0]} "
                 f"elements: annotate {name}: htile.PerRow for an index of each row, or {name}: "
                 "htile.Shared for indices that all rows share")  # fmt: skip
        is_many = True
    if is_many and y._value.dtype in (torch.int32, INT64):
        is_short = x._sizes[0] <= MOST_PARTS
        is_row = x._value.varies is Varies.ROW and x._sizes[0] == x._builder.n
        found = _gathered(x, y, wraps) if y.ndim == 1 and (is_row or not is_short) else None
        if found is None and is_short:
            found = chosen(x, y, wraps)
        if found is not None:
            note_table(x._builder, x._id)
            return found
    if y.ndim != 1 or not 1 < y._sizes[0] <= MOST_PARTS or y._value.dtype is BOOL:
        return element(x, per_row_index(y, what), wraps)
    each = [element(x, per_row_index(y[k], what), wraps) for k in range(y._sizes[0])]
    return cat([unsqueeze(found, -1) for found in each])


def _gathered(x: Tensor, y: Tensor, wraps: bool) -> Tensor | None:
    """What `gathered` gives, with indices that may lie beyond the ends."""
    v, n = x._value, x._sizes[0]
    y = where(y < 0, y + n, y) if wraps else y
    found = gathered(x, y)
    if found is None:
        return None
    is_there, dtype = (y >= 0) & (y < n), v.stored or v.dtype
    if v.dtype in STORAGE:
        return cast(where(is_there, wide(found), NAN if v.dtype in FLOAT8 else 0), v.dtype)
    found = where(is_there, found, {FLOAT: NAN, BOOL: False}.get(v.dtype, 0))
    return found if found._value.stored is v.stored else cast(found, dtype)


def _of_groups(x: Tensor, y: Tensor) -> Tensor | None:
    """The elements of a row at `torch.arange(n) // size`: each is that of a group of columns.

    None where the indices are others, or groups are none that the columns may be in.
    """
    builder, (count,) = y._builder, x._sizes
    divided = _unconverted(builder, y._id)
    if divided.op not in (Op.FLOORDIV, Op.RSHIFT) or len(divided.value.inner) != 1:
        return None
    column, by = (_unconverted(builder, i) for i in divided.inputs)
    if builder.multiple is not None or column.op is not Op.INDEX:
        return None
    if by.op is not Op.CONST or by.value.spread or by.arg < 1:
        return None
    size, n = by.arg if divided.op is Op.FLOORDIV else 1 << by.arg, y._sizes[0]
    if size & (size - 1) or not SMALLEST_GROUP <= size < n <= size * count:
        return None
    groups = part(x, -1, 0, -(-n // size))
    return part(repeat_interleave(groups, size), -1, 0, n)


def _unconverted(builder: Builder, id: int) -> Node:
    """The node of an index, before it was converted to another integer that holds it."""
    while builder[id].op is Op.CONVERT and builder[id].value.dtype in (torch.int32, INT64):
        id = builder[id].inputs[0]
    return builder[id]


def _is_of_columns(x: Tensor, y: Tensor) -> bool:
    """Whether a row has an index for each column, and they choose among enough.

    Threads look up the indices of their own columns together then. One by one, every thread would
    look up every index. Indices that are numbers of the row, as those of sorted elements are, are
    looked up one by one all the same. So are those of a row beside longer ones: each would be
    written out, with a choice among all numbers.
    """
    count, n = prod(y._sizes), x._builder.n
    if y._value.varies is not Varies.ROW or count < n or _is_of_numbers(y):
        return False
    is_table = x._value.varies is not Varies.ROW and 1 < x._sizes[0] <= count
    return is_table or (y.ndim == 1 and count == n >= LEAST_TOGETHER)


def _is_of_numbers(y: Tensor) -> bool:
    """Whether a value is made of numbers of the row that were joined."""
    builder, known, todo = y._builder, set(), [y._id]
    while todo:
        each = builder[todo.pop()]
        if each.id in known or each.op in COLLECTIVES:
            continue
        known.add(each.id)
        if each.op is Op.CAT and all([prod(builder[i].value.inner) == 1 for i in each.inputs]):
            return True
        todo += each.inputs
    return False


def chosen(x: Tensor, y: Tensor, wraps: bool) -> Tensor:
    """The parts of a value along its first axis, at integers: (*y.shape, *inner) of (few, *inner).

    y: of shape (), or a row of indices in a short row.

    The bits of an index choose, the lowest one first: each leaves half of the elements.
    """
    v, n = x._value, x._sizes[0]
    if v.dtype in STORAGE:
        return cast(chosen(wide(x), y, wraps), v.dtype)
    y = where(y < 0, y + n, y) if wraps else y
    bits, left = convert(y, torch.int32), [_getitem(x, k) for k in range(n)]
    for bit in range((n - 1).bit_length()):
        is_one = (bits & (1 << bit)) != 0
        pairs = zip(left[::2], left[1::2], strict=False)
        left = [where(is_one, b, a) for a, b in pairs] + left[len(left) - len(left) % 2 :]
    beyond = {FLOAT: NAN, BOOL: False}.get(v.dtype, 0)
    found = where((y >= 0) & (y < n), left[0], beyond)
    return found if v.stored is None or found._value.stored is v.stored else cast(found, v.stored)


def int64(y: Tensor, what: str) -> Tensor:
    """`y`, which must be int64, as torch demands."""
    if y._value.dtype is not INT64:
        name = str(y.dtype).removeprefix("torch.")
        fail(DtypeError, f"{what} takes indices of int64, not {name}: write y.long()")
    return y


def one_hot(tensor, num_classes=-1):
    """1 at the index and 0 elsewhere, in int64; give num_classes=x.shape[-1].

    tensor: int64, of shape () or (k,). More than 64 indices have at most 64 classes. The result has
    an axis of `num_classes` more. It is 0 there for an index beyond the end, where torch raises.
    """
    (num_classes,) = fixed((num_classes,), tensor)
    is_short = tensor.ndim == 1 and min(tensor._sizes[0], num_classes) <= MOST_PARTS
    is_hot = is_short and tensor._value.dtype is INT64
    y = tensor if is_hot else int64(per_row_index(tensor, "F.one_hot"), "F.one_hot")
    if num_classes < 1:
        fail(ShapeError, f"F.one_hot(num_classes={num_classes}): the number of classes is not "
             "known while tracing, write F.one_hot(y, num_classes=x.shape[-1])")  # fmt: skip
    return convert(index(y._builder, num_classes) == unsqueeze(y, -1), INT64)


FUNCTIONS[torch.nn.functional.one_hot] = "F.one_hot", one_hot
