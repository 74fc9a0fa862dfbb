// The first tab: a row of numbers. Its walk, what comes out, the same blocks as a tree.

const EXAMPLES = [
  ["worked", "1 5 3 9 2", 3], ["rising", "1 2 3 4 5 6 7 8", 2], ["large", "1000 1001 999 1002", 1],
  ["small", "-1000 -1001 -1e30", 1], ["masked", "-inf -inf 3 -inf 1 4 -inf -inf", 2],
  ["inf", "1 inf 2 3", 2], ["nan", "1 2 nan 3", 2],
];

function rowTab(changed) {
  const bars = strips(find("strips"), [
    word("x_strip"), word("weight_strip"), word("prob_strip")]);
  const drawTree = treeView(find("tree"), find("tree-detail"));
  let [values, block, walk, r] = [[], 1, null, null];
  let segments = [];

  function parse(text) {
    const found = numbers(text);
    if (!found.length) throw new Wrong(word("no_numbers"));
    atMost(["numbers", LIMITS.numbers], found.length);
    return found;
  }

  // Read the fields; false if one is wrong, and then the page stays at what it had.
  function take(type) {
    const [given, size] = [read("numbers", parse), read("block", whole)];
    if (!given || !size) return false;
    [values, block, r] = [given, Math.min(size, given.length), recurrence(type)];
    walk = trace(values, block, type);
    const x = walk.steps.flatMap((step) => step.values);
    bars.build(x, block);
    results(type);
    drawTree(tree(values, block, type), walk);
    dBar();
    command(type);
    return true;
  }

  function command(type) {
    const blocks = block === 1 ? "" : ` --block ${block}`;
    find("row-command").textContent =
      type === "float32" ? `online-softmax trace ${values.map(shortest).join(" ")}${blocks}` : "";
  }

  function dBar() {
    segments = values.map(() => make("i"));
    find("d-bar").replaceChildren(...segments);
  }

  function results(type) {
    const x = walk.steps.flatMap((step) => step.values);
    const plain = x.map(r.exp);
    const bad = (value) => make("span", { class: Number.isFinite(value) ? "" : "bad" }, show(value));
    const rows = x.map((each, i) => [
      show(each), bad(plain[i]), bad(walk.naive[i]),
      make("span", { class: Number.isNaN(walk.probabilities[i]) ? "bad" : "" }, show(walk.probabilities[i]))]);
    rows.push([word("sum_of"), bad(r.sum(plain)), "", show(r.sum(walk.probabilities))]);
    const headings = ["x", word("exp_x"), word("naive"), word("softmax")];
    table(find("results"), headings, rows, { marks: [...x.map(() => ""), "total"] });
    const fold = walk.steps.reduce((total, step) => total + step.exponentials, 0);
    const said = [
      ...x.flatMap((each, i) => (Number.isFinite(values[i]) && !Number.isFinite(each)
        ? [word("past_largest", general(values[i], 10), type)] : [])),
      word("lse_is", show(walk.lse)), word("fold_and_write", fold, x.length),
      naive(values, walk, type),
    ];
    find("said").replaceChildren(...[...new Set(said)].map((text) => make("p", {}, text)));
  }

  function steps(n) {
    const headings = [
      word("step"), word("reads"), "m", word("old_weight"), word("new_weight"), "d",
      word("exponentials")];
    const rows = walk.steps.map((step, i) => {
      const d = Number.isFinite(step.m) ? show(step.d) : "–";
      const after = [
        show(step.m), show(step.old_weight), show(step.new_weight), d, String(step.exponentials)];
      return [goTo(i + 1, changed), list(step.values), ...after.map((x) => (i < n ? x : ""))];
    });
    stepTable(find("steps"), headings, rows, n, [1]);
  }

  // Show the state after n steps.
  function move(n) {
    const step = walk.steps[n - 1];
    const before = n > 1 ? walk.steps[n - 2] : r.empty();
    const done = Math.min(n * block, values.length);
    const state = step ?? r.empty();
    const x = walk.steps.flatMap((each) => each.values);
    bars.move(state, x, done, step ? step.values.length : 0, r);
    const largest = Math.max(1, ...walk.steps.map((each) => each.d).filter(Number.isFinite));
    segments.forEach((segment, i) => {
      const weight = i < done && Number.isFinite(state.m) ? r.exp(x[i] - state.m) : 0;
      segment.style.width = `${(100 * clamp(weight)) / largest}%`;
      segment.className = step && i >= done - step.values.length ? "fresh" : "";
    });
    find("d-now").textContent = Number.isFinite(state.m) || !n ? show(state.d) : "–";
    find("equation").replaceChildren(...equation(before, step));
    steps(n);
    drawTree.mark(n - 1);
    return spoken(before, step, n);
  }

  function equation(before, step) {
    if (!step) return [make("p", { class: "quiet" }, word("nothing_read"))];
    const names = {
      m: [word("old_m"), word("block_m")], d: [word("old_d"), word("new_part")] };
    const parts = [{ o: [], ...before }, r.of(step.values)];
    const lines = merged(...parts, [step.old_weight, step.new_weight], { o: [], ...step }, names);
    if (Number.isFinite(step.m)) return lines;
    return [lines[0], make("p", { class: "quiet" }, word("means_nothing", show(step.m)))];
  }

  function spoken(before, step, n) {
    if (!step) return word("live_start");
    const d = Number.isFinite(step.m)
      ? word("live_d", few(step.old_weight), few(step.new_weight), few(step.d))
      : word("means_nothing", show(step.m));
    return [
      word("live", n, walk.steps.length, step.values.map(few).join(", ")),
      word("live_m", few(before.m), few(step.m)), d].join(" ");
  }

  return { take, move, count: () => walk.steps.length };
}

// The shortest text that reads back as the same number.
const shortest = (x) => (Number.isFinite(x) ? String(x) : general(x));

// What exponentials without a maximum would have given, as the command says it.
function naive(values, walk, type) {
  const { m } = walk.steps.at(-1);
  if (!Number.isFinite(m)) return word("naive_m", general(m));
  const limit = Math.log(LARGEST[type]);
  const largest = Math.max(...values.filter(Number.isFinite));
  if (largest > limit) return word("naive_overflow", general(largest), limit.toFixed(2));
  if (walk.naive.some(Number.isNaN)) return word("naive_zero", type);
  if (!walk.naive.some((each) => each !== 0)) return word("naive_sum");
  return word("naive_works", limit.toFixed(2));
}
