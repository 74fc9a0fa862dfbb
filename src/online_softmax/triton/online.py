"""The recurrence in Triton: the running pair (m, d), same names and order as reference/online.py.

A state is two float32 tensors of one shape, one element for each row, or for each lane that walks a
row. All of it is elementwise, so the compiler's layout cannot change a bit, except `row_max`, which
is exact in any order, and `row_sum`, which fixes its order.

M. Milakov, N. Gimelshein: Online normalizer calculation for softmax, arXiv:1805.02867.
"""

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x LOG2_E)
LN_2 = tl.constexpr(0.6931471805599453)  # a score in base 2 times this is in natural units


@triton.jit
def exponential(x: tl.tensor, IS_BASE_2: tl.constexpr = False) -> tl.tensor:
    """exp(x) as one multiplication and the hardware's 2^x, where results under 2^-126 become 0.

    tl.exp keeps those, for three more instructions an element. The caller subtracts the maximum
    first, so the maximum's own term is exactly 1. IS_BASE_2: x was multiplied by LOG2_E before.
    """
    if IS_BASE_2:
        return tl.exp2(x)
    else:  # noqa: RET505
        return tl.exp2(x * LOG2_E)


@triton.jit
def maximum(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The larger of two; NaN if either is NaN. Triton drops NaN by default, here and in tl.max."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_max(x: tl.tensor, axis: tl.constexpr = 0) -> tl.tensor:
    """The maximum along an axis; NaN if any element is NaN."""
    return tl.reduce(x, axis, maximum)


@triton.jit
def row_sum(x: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """The sum of LANES elements, neighbours first, in an order given by their index alone.

    tl.sum would follow the layout, and the layout follows the alignment of the tensor that the
    kernel was given: a row would have other bits in another place.
    """
    for step in tl.static_range(LANES.bit_length() - 2):
        x = tl.sum(tl.reshape(x, (LANES >> (step + 1), 2)), 1)
    return tl.sum(x, 0)  # of the last two


@triton.jit
def empty(LANES: tl.constexpr) -> tl.tuple:
    """The identity of merge, (-inf, 0), in each lane."""
    return tl.full((LANES,), -INF, tl.float32), tl.zeros((LANES,), tl.float32)


@triton.jit
def lift(x: tl.tensor) -> tl.tuple:
    """Each element as a state of its own: (x, 1)."""
    return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def weight(part: tl.tensor, m: tl.tensor, IS_BASE_2: tl.constexpr = False) -> tl.tensor:
    """exp(part - m), and 1 where they are equal, so that equal infinities are never subtracted.

    The only place where two maxima meet in a subtraction.
    """
    return exponential(tl.where(part == m, 0.0, part - m), IS_BASE_2)


@triton.jit
def join(m_a: tl.tensor, m_b: tl.tensor, IS_BASE_2: tl.constexpr = False) -> tl.tuple:
    """Two maxima -> their maximum, and what each part counts for from now on."""
    m = maximum(m_a, m_b)
    return m, weight(m_a, m, IS_BASE_2), weight(m_b, m, IS_BASE_2)


@triton.jit
def merge(m_a: tl.tensor, d_a: tl.tensor, m_b: tl.tensor, d_b: tl.tensor) -> tl.tuple:
    """The state of two parts together. Also a combine function for tl.reduce."""
    m, w_a, w_b = join(m_a, m_b)
    return m, d_a * w_a + d_b * w_b


@triton.jit
def of(xs: tl.tuple) -> tl.tuple:
    """The state of a block: one maximum, then one exponential an element.

    xs: several tensors of one shape, float32; each lane's block is its element of every one.
    """
    m = xs[0]
    for i in tl.static_range(1, len(xs)):
        m = maximum(m, xs[i])
    shift = tl.where(m == -INF, 0.0, m)
    d = exponential(xs[0] - shift)
    for i in tl.static_range(1, len(xs)):
        d += exponential(xs[i] - shift)
    return m, d


@triton.jit
def absorb(m: tl.tensor, d: tl.tensor, xs: tl.tuple) -> tl.tuple:
    """The state with a block of further elements, as in `of`: the inner loop."""
    m_b, d_b = of(xs)
    return merge(m, d, m_b, d_b)


@triton.jit
def absorb_tile(m: tl.tensor, d: tl.tensor, z: tl.tensor, factor: tl.tensor) -> tl.tuple:
    """The states of rows with a tile of scores, in base 2: attention's inner loop.

    z: (rows, columns); z times factor, above 0, is a score times LOG2_E. The product is rounded
    once, for the maximum; each element's exponent is one multiply-add from it. All weights and
    sums are relative to that m, so where it was rounded to does not matter.

    Returns (m, d, p, w): p = exp(score - m) of each element, and what was summed before the tile
    counts w for from now on.
    """
    m, w, _ = join(m, row_max(z, 1) * factor, True)
    shift = tl.where(m == -INF, 0.0, m)
    p = exponential(tl.fma(z, factor, -shift[:, None]), True)
    return m, d * w + tl.sum(p, 1), p, w


@triton.jit
def merge_lanes(
    m: tl.tensor, d: tl.tensor, LANES: tl.constexpr, IS_BASE_2: tl.constexpr = False
) -> tl.tuple:
    """LANES states -> one: the common maximum first, so one exponential a lane, not two a merge."""
    m_row = row_max(m)
    return m_row, row_sum(d * weight(m, m_row, IS_BASE_2), LANES)


@triton.jit
def is_finite(x: tl.tensor) -> tl.tensor:
    """False for NaN too."""
    return tl.abs(x) < INF


@triton.jit
def prob(x: tl.tensor, m: tl.tensor, d: tl.tensor) -> tl.tensor:
    """exp(x - m) / d; NaN where m is not finite. The compiler makes the factor once a row."""
    factor = tl.where(is_finite(m), 1.0 / d, float("nan"))
    return exponential(x - m) * factor


@triton.jit
def log_prob(x: tl.tensor, m: tl.tensor, d: tl.tensor) -> tl.tensor:
    """(x - m) - log d, in that order: a large m must not swallow log d. NaN as in prob."""
    log_d = tl.where(is_finite(m), tl.log(d), float("nan"))
    return (x - m) - log_d


@triton.jit
def lse(m: tl.tensor, d: tl.tensor) -> tl.tensor:
    """m + log d, a natural logarithm; m itself where m is not finite."""
    return tl.where(is_finite(m), m + tl.log(d), m)
