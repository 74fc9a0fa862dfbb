// The second tab: attention. Tiles of scores, each query's state, and o.

function attentionTab(changed, edited) {
  const bars = strips(find("score-strips"), [
    word("score_strip"), word("out_weight_strip"), word("out_prob_strip")]);
  let [walk, tile, query, hidden, given] = [null, 1, 0, null, null];
  let [moveO, moveOut] = [null, null];

  const lines = (id) => {
    const limits = { q: ["queries", "dim"], k: ["keys", "dim"], v: ["keys", "value_dim"] }[id];
    const [most, wide] = limits.map((name) => [name, LIMITS[name]]);
    return read(id, (text) => matrix(text, most, wide));
  };

  // Complain at a field of something that only another field makes wrong.
  function agree(id, isRight, ...why) {
    if (isRight) return true;
    return read(id, () => { throw new Wrong(word(...why)); }) !== null;
  }

  function take(type) {
    const [q, k, v, size] = [lines("q"), lines("k"), lines("v"), read("tile", whole)];
    if (!q || !k || !v || !size) return false;
    const fits = agree("k", k[0].length === q[0].length, "k_dim", k[0].length, q[0].length);
    if (!(agree("v", v.length === k.length, "v_rows", v.length, k.length) && fits)) return false;
    const isMasked = find("mask").checked;
    const isSame = hidden && hidden.length === q.length && hidden[0].length === k.length;
    // A padded key, until somebody chooses others.
    if (isMasked && !isSame) hidden = q.map(() => k.map((_, j) => j === k.length - 1));
    given = { q, k, v, type, causal: find("causal").checked };
    tile = Math.min(size, k.length);
    const mask = isMasked ? hidden.map((row) => row.map((each) => !each)) : null;
    walk = attention({ ...given, block: tile, mask });
    query = Math.min(query, q.length - 1);
    scoreTable(isMasked);
    choose();
    command(isMasked);
    return true;
  }

  // What depends on the query whose walk is shown.
  function choose() {
    const row = walk.rows[query];
    bars.build(walk.z[query], tile);
    moveO = signed(find("o-bars"), word("o_strip"), given.v[0].length);
    moveOut = signed(find("out-bars"), word("out_strip"), given.v[0].length);
    find("attention-step-title").textContent = word("attention_step", query);
    find("attention-steps-title").textContent = word("attention_steps", query);
    find("halves-title").textContent = word("halves_title", query);
    halves(row);
    outputs();
  }

  // The command walks over values by rule alone.
  function command(isMasked) {
    const { q, k, v, causal, type } = given;
    const sizes = {
      queries: q.length, keys: k.length, dim: q[0].length, value_dim: v[0].length };
    const byRule = JSON.stringify(rule(sizes)) === JSON.stringify({ q, k, v });
    const counts = { ...sizes, block: tile };
    const words = Object.keys(counts).filter((name) => counts[name] !== DEFAULT_SIZES[name])
      .map((name) => ` --${name.replace("_", "-")} ${counts[name]}`);
    find("attention-command").textContent = byRule && !isMasked && type === "float32"
      ? `online-softmax trace --attention${words.join("")}${causal ? " --causal" : ""}` : "";
  }

  function scoreTable(isMasked) {
    const head = make("tr", {}, make("td"), walk.z[0].map((_, j) =>
      make("th", { scope: "col", class: j % tile ? null : "first" }, `k${j}`)));
    const rows = walk.z.map((scores, i) => make("tr", {},
      make("th", { scope: "row" }, make("label", {}, make("input", {
        type: "radio", name: "query", value: i, checked: i === query,
        "aria-label": word("show_query", i), onchange: () => pick(i) }), `q${i}`)),
      scores.map((x, j) => {
        const cell = isMasked ? make("button", {
          type: "button", "aria-pressed": String(hidden[i][j]), "aria-label": word("hide", i, j),
          onclick: () => toggle(i, j) }, few(x)) : few(x);
        return make("td", { class: j % tile ? "score" : "score first" }, cell);
      })));
    find("scores").replaceChildren(
      make("table", {}, make("thead", {}, head), make("tbody", {}, rows)));
    const [queries, keys] = [walk.z.length, walk.z[0].length];
    find("scores-caption").textContent =
      word("scores_caption", `${queries} × ${tile}`, `${queries} × ${keys}`);
  }

  function toggle(i, j) {
    hidden[i][j] = !hidden[i][j];
    edited();
    find("scores").querySelectorAll("tbody tr")[i].querySelectorAll("button")[j].focus();
  }

  function pick(i) {
    query = i;
    choose();
    changed(null);
  }

  const keysOf = ({ first, last }) =>
    (last < first ? word("none") : first === last ? `${first}` : `${first}–${last}`);
  const vector = (values) => list(values, 5);

  function halves(row) {
    const headings = [
      word("keys_read"), "m", word("part_weight"), "d", "o"];
    const state = (each, weight) => [
      show(each.m, 5), weight, show(each.d, 5), vector(each.o)];
    table(find("halves"), headings, [
      ...row.halves.map((half) => [keysOf(half), ...state(half.state, show(half.weight, 5))]),
      [word("both"), ...state(row.merged, "")]], { marks: ["", "", "total"], left: [0] });
  }

  function outputs() {
    const headings = ["query", "by_tile", "by_parts", "plain", "lse"].map((key) =>
      (key === "query" ? "query" : word(key)));
    table(find("outputs"), headings, walk.rows.map((row, i) => [
      String(i), vector(row.output), vector(row.merged_output), vector(row.plain),
      show(row.lse, 5)]), { marks: walk.rows.map((_, i) => (i === query ? "now" : "")) });
    const none = walk.rows.flatMap((row, i) => (row.lse === -Infinity ? [word("query", i)] : []));
    const said = [
      ...(none.length ? [word("no_key", none.join(", "))] : []),
      word("largest", show(walk.largest_difference, 2))];
    find("outputs-said").replaceChildren(...said.map((text) => make("p", {}, text)));
  }

  function steps(n) {
    const headings = [
      word("step"), word("keys_read"), word("scores"), "m", word("old_weight"),
      word("tile_weight"), "d", "o"];
    const rows = walk.rows[query].steps.map((step, i) => {
      const after = [
        vector(step.scores), show(step.after.m, 5), show(step.old_weight, 5),
        show(step.new_weight, 5), show(step.after.d, 5), vector(step.after.o)];
      return [goTo(i + 1, changed), keysOf(step), ...after.map((x) => (i < n ? x : ""))];
    });
    stepTable(find("attention-steps"), headings, rows, n, [1, 2]);
  }

  function move(n) {
    const row = walk.rows[query];
    const step = row.steps[n - 1];
    const width = given.v[0].length;
    const r = recurrence(given.type);
    const state = step ? step.after : r.empty(width);
    const keys = walk.z[0].length;
    const done = Math.min(n * tile, keys);
    const size = step ? step.scores.length : 0;
    bars.move(state, walk.z[query], done, size, r);
    const most = (values) =>
      Math.max(0, ...values.flat().filter(Number.isFinite).map((x) => Math.abs(x)));
    moveO(state.o, most(row.steps.map((each) => each.after.o)));
    moveOut(r.output(state), most(row.steps.map((each) => r.output(each.after))));
    find("scores").querySelectorAll("tbody tr").forEach((line, i) => {
      line.classList.toggle("now", i === query);
      line.querySelectorAll(".score").forEach((cell, j) => {
        cell.classList.toggle("fresh", j < done && j >= done - size);
        cell.classList.toggle("unread", j >= done);
        cell.classList.toggle("gone", j < done - size);
        cell.classList.toggle("hidden", walk.z[i][j] === -Infinity);
      });
    });
    equation(step);
    steps(n);
    return step ? spoken(step, n, row.steps.length) : word("live_start");
  }

  function equation(step) {
    const host = find("attention-equation");
    if (!step) {
      host.replaceChildren(make("p", { class: "quiet" }, word("nothing_read")));
      return;
    }
    const names = {
      m: [word("old_m"), word("tile_m")], d: [word("old_d"), word("tile_d")],
      o: [word("old_o"), word("tile_o")] };
    const weights = [step.old_weight, step.new_weight];
    const lines = merged(step.before, step.part, weights, step.after, names);
    host.replaceChildren(...(Number.isFinite(step.after.m) ? lines
      : [lines[0], make("p", { class: "quiet" }, word("means_nothing", show(step.after.m)))]));
  }

  function spoken(step, n, total) {
    const { before, after } = step;
    return [
      `${word("query", query)}:`, word("live", n, total, step.scores.map(few).join(", ")),
      word("live_m", few(before.m), few(after.m)),
      word("live_d", few(step.old_weight), few(step.new_weight), few(after.d)),
      word("live_o", after.o.map(few).join(", "))].join(" ");
  }

  // What a link keeps beside the fields: the query, and who is hidden.
  const kept = () => ({
    query, mask: find("mask").checked && hidden
      ? hidden.map((row) => row.map((each) => (each ? "0" : "1")).join("")).join(".") : "" });

  function restore({ query: wanted, mask }) {
    query = Math.max(0, Math.trunc(Number(wanted)) || 0);
    find("mask").checked = /^[01]+(\.[01]+)*$/.test(mask ?? "");
    hidden = find("mask").checked
      ? mask.split(".").map((row) => [...row].map((each) => each === "0")) : null;
  }

  return { take, move, kept, restore, count: () => walk.rows[0].steps.length };
}
