// The recurrence, under the names of reference/online.py and reference/outputs.py, which decide.
//
// A state is {m, d, o}: the maximum so far, the sum of exp(x - m), and the sum of exp(x - m) v,
// empty where nothing is weighed. Where m is not finite, d and o mean nothing and nothing reads
// them. Each operation is rounded to the type, so float32 here is float32 there.

const ROUND = { float32: Math.fround, float64: (x) => x };
const LARGEST = { float32: Math.fround(3.4028234663852886e38), float64: Number.MAX_VALUE };

function recurrence(type) {
  const round = ROUND[type];
  const exp = (x) => round(Math.exp(x));
  const sum = (values) => values.reduce((total, x) => round(total + x), 0);

  // The identity of merge.
  const empty = (width = 0) => ({ m: -Infinity, d: 0, o: Array(width).fill(0) });

  // exp(part - m), and 1 where both are the same infinity. The only subtraction of two maxima.
  function weight(part, m) {
    const isSame = part === m && Math.abs(m) === Infinity;
    return exp(isSame ? 0 : round(part - m));
  }

  // Two maxima -> their maximum, NaN if one is, and what each part counts for from now on.
  function join(mA, mB) {
    const m = Math.max(mA, mB); // NaN if either is
    return [m, weight(mA, m), weight(mB, m)];
  }

  // An empty part's o may hold anything: it counts for nothing.
  const counted = (state) => (state.m === -Infinity ? state.o.map(() => 0) : state.o);

  function merge(a, b) {
    const [m, wA, wB] = join(a.m, b.m);
    const both = (x, y) => round(round(x * wA) + round(y * wB));
    const other = counted(b);
    return { m, d: both(a.d, b.d), o: counted(a).map((x, i) => both(x, other[i])) };
  }

  // The state of a block: one maximum, then one exponential an element. v: a vector for each.
  function of(x, v = []) {
    const m = Math.max(...x); // -Infinity of nothing
    const shift = m === -Infinity ? 0 : m;
    const p = x.map((each) => exp(round(each - shift)));
    const width = v.length ? v[0].length : 0;
    const o = Array.from({ length: width }, (_, col) =>
      sum(p.map((each, i) => round(each * v[i][col]))));
    return { m, d: sum(p), o };
  }

  const absorb = (state, x, v) => merge(state, of(x, v));

  const prob = (x, state) =>
    Number.isFinite(state.m) ? round(exp(round(x - state.m)) / state.d) : NaN;

  const lse = (state) =>
    Number.isFinite(state.m) ? round(state.m + round(Math.log(state.d))) : state.m;

  // o / d; 0 where nothing was summed, NaN where m is +inf or NaN.
  function output(state) {
    if (state.m === -Infinity) return state.o.map(() => 0);
    return state.o.map((x) => (Number.isFinite(state.m) ? round(x / state.d) : NaN));
  }

  return { round, exp, sum, empty, join, merge, of, absorb, prob, lse, output };
}
