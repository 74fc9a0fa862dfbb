// What is walked over: a row by blocks, the same blocks merged as a tree, attention by tiles.
// The records are those of `trace --json` and `trace --attention --json`, key by key.

// Cut into parts of `size`.
const split = (values, size) =>
  Array.from({ length: Math.ceil(values.length / size) }, (_, i) =>
    values.slice(i * size, (i + 1) * size));

// As lab/trace.py: (m, d) over numbers, `block` at a time.
function trace(values, block, type = "float32") {
  const r = recurrence(type);
  const x = values.map(r.round);
  let state = r.empty();
  const steps = split(x, block).map((part, i) => {
    const [, oldWeight, newWeight] = r.join(state.m, r.of(part).m);
    state = r.absorb(state, part);
    return {
      step: i + 1, values: part, m: state.m, d: state.d,
      old_weight: oldWeight, new_weight: newWeight,
      exponentials: part.length === 1 ? 2 : part.length + 2,
    };
  });
  const total = r.sum(x.map(r.exp));
  return {
    block, steps,
    probabilities: x.map((each) => r.prob(each, state)),
    lse: r.lse(state),
    naive: x.map((each) => r.round(r.exp(each) / total)),
  };
}

// The blocks' states merged in pairs, a round after the other; one that is left over waits.
// Each node: its blocks, its state, its round and, where it was merged, two parts and weights.
function tree(values, block, type = "float32") {
  const r = recurrence(type);
  const leaves = split(values.map(r.round), block).map((part, i) =>
    ({ first: i, last: i, round: 0, values: part, ...r.of(part), parts: [], weights: [] }));
  const nodes = [...leaves];
  let row = leaves;
  for (let round = 1; row.length > 1; round += 1) {
    row = split(row, 2).map(([a, b]) => {
      if (!b) return a;
      const [, ...weights] = r.join(a.m, b.m);
      const node = { first: a.first, last: b.last, round, ...r.merge(a, b), parts: [a, b], weights };
      nodes.push(node);
      return node;
    });
  }
  return { nodes, root: row[0], leaves: leaves.length };
}

// Small whole numbers by the fixed rule of lab/attentiontrace.py.
function rule({ queries, keys, dim, value_dim: valueDim }) {
  const matrix = (rows, cols, down, right, first, count) =>
    Array.from({ length: rows }, (_, row) => Array.from({ length: cols }, (_, col) =>
      ((down * row + right * col + first) % count) - Math.floor(count / 2)));
  return {
    q: matrix(queries, dim, 2, 1, 2, 5),
    k: matrix(keys, dim, 3, 4, 3, 5),
    v: matrix(keys, valueDim, 2, 3, 4, 7),
  };
}

// As lab/attentiontrace.py: (m, d, o) over tiles of keys. mask[query][key]: true takes part.
function attention({ q, k, v, block, causal = false, mask = null, type = "float32" }) {
  const r = recurrence(type);
  const [queries, keys, dim] = [q.length, k.length, q[0].length];
  const typed = (matrix, round) => matrix.map((row) => row.map(round));
  const [qt, kt, vt] = [q, k, v].map((matrix) => typed(matrix, r.round));
  const scale = dim ** -0.5;
  const sees = (i, j) => (!causal || j <= i + keys - queries) && (!mask || mask[i][j]);
  const dot = (a, b) => r.sum(a.map((each, i) => r.round(each * b[i])));
  const score = (i, j) =>
    sees(i, j) ? r.round(r.round(scale) * dot(qt[i], kt[j])) : -Infinity;
  const z = qt.map((_, i) => kt.map((_, j) => score(i, j)));
  const starts = split(kt.map((_, j) => j), block).map((tile) => tile[0]);
  const cut = Math.ceil(starts.length / 2) * block; // keys of the first part, whole tiles
  const width = v[0].length;

  const fold = (i, first, last) => {
    let state = r.empty(width);
    for (const start of starts.filter((each) => each >= first && each < last)) {
      state = r.absorb(state, z[i].slice(start, start + block), vt.slice(start, start + block));
    }
    return state;
  };

  const rows = z.map((scores, i) => {
    let state = r.empty(width);
    const steps = starts.map((start) => {
      const [x, vectors] = [scores, vt].map((each) => each.slice(start, start + block));
      const before = state;
      const part = r.of(x, vectors);
      const [, oldWeight, newWeight] = r.join(before.m, part.m);
      state = r.merge(before, part);
      return {
        first: start, last: start + x.length - 1, scores: x, before,
        old_weight: oldWeight, new_weight: newWeight, after: state, part,
      };
    });
    const halves = [fold(i, 0, cut), fold(i, cut, keys)];
    const [, ...weights] = r.join(halves[0].m, halves[1].m);
    const merged = r.merge(...halves);
    const ends = [[0, Math.min(cut, keys) - 1], [cut, keys - 1]];
    return {
      steps,
      halves: halves.map((half, n) =>
        ({ first: ends[n][0], last: ends[n][1], state: half, weight: weights[n] })),
      merged, output: r.output(state), merged_output: r.output(merged), lse: r.lse(state),
      plain: formula(qt[i], kt, vt, (j) => sees(i, j)),
    };
  });
  const differences = rows.filter((row) => row.steps.at(-1).after.m > -Infinity).flatMap((row) =>
    [row.output, row.merged_output].flatMap((given) =>
      given.map((each, col) => Math.abs(each - row.plain[col]))));
  return {
    scale, z, rows,
    masked: starts.filter((start) =>
      z.some((row) => row.slice(start, start + block).some((x) => Math.abs(x) === Infinity))),
    largest_difference: differences.length ? Math.max(...differences) : 0,
  };
}

// softmax(z) v of one query with all scores at once, in float64; NaN where it sees no key.
function formula(q, k, v, sees) {
  const z = k.map((key, j) => (sees(j)
    ? q.reduce((total, each, i) => total + each * key[i], 0) / Math.sqrt(q.length) : -Infinity));
  const top = Math.max(...z);
  const p = z.map((each) => Math.exp(each - top));
  const total = p.reduce((sum, each) => sum + each, 0);
  return v[0].map((_, col) => p.reduce((sum, each, j) => sum + each * v[j][col], 0) / total);
}
