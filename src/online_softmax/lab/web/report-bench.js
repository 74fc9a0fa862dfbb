// Cells of bench: speed by columns with the rivals as switches, and few rows as a heat map.
"use strict";

// The order of a cell and of an entry, as lab/reportcells.py writes them.
const OP = 0, TYPE = 1, ROWS = 2, COLS = 3, VALUES = 4, FLAGS = 5, BYTES = 6, ENTRIES = 7, SAID = 8;
const US = 0, P20 = 1, P80 = 2, SHARE = 3, TIMES = 4, LATE = 5, PAST = 6;
const RAGGED = 1, LARGE = 2, WARM = 4, FEW = 8;
const GAP = 9; // times as wide: what lies further apart is not joined
const bench = data.bench;
const CEILING = bench.contenders.indexOf("ceiling"), OURS = bench.contenders.indexOf("ours");

const TONES = { __proto__: null, ours: "ours", torch: "torch", compile: "compile", quack: "quack", liger: "liger",
  ceiling: "limit", "ours, fast": "ours", "ours, low": "ours2", "torch, flash": "torch",
  "torch, cudnn": "compile", "the limit": "limit", tutorial: "other3" };
const MARK = { __proto__: null, ours: "circle", torch: "square", compile: "triangle-up", quack: "diamond",
  liger: "triangle-down", ceiling: "cross" };
const SPARE = ["other1", "other2", "other3", "ours2"];
function tone(name) {
  if (!own(TONES, name)) TONES[name] = name.startsWith("ours") ? "ours2" : SPARE[tone.next++ % SPARE.length];
  return TONES[name];
}
tone.next = 0;
const mark = (name) => own(MARK, name) || "cross";
const called = (name) => own(data.names, name) || name;

const timed = (cell, i) => (Array.isArray(cell[ENTRIES][i]) && !cell[ENTRIES][i][PAST] ? cell[ENTRIES][i] : null);
const gbs = (cell, i) => { const entry = timed(cell, i); return entry ? cell[BYTES] / entry[US] / 1e3 : null; };
const shape = (cell) => `${shown("count", cell[ROWS])} x ${shown("count", cell[COLS])}`;
const has = (cell, flag) => (cell[FLAGS] & flag) !== 0;

// ---- tables of cells

function cellSheet(cells, title) {
  const asked = bench.contenders.map((_, i) => i).filter((i) => cells.some((cell) => cell[ENTRIES][i] != null));
  const others = asked.filter((i) => i !== CEILING && i !== OURS);
  const isRival = (i) => !bench.contenders[i].startsWith("ours");
  const columns = [["rows", "count"], ["columns", "count"], ["limit µs", "us"], ["µs", "us"], ["p20", "us"],
    ["p80", "us"], ["GB/s", "count"], ["of the limit", "share"]];
  for (const i of others) {
    columns.push([`${bench.contenders[i]} µs`, "us"]);
    if (isRival(i)) columns.push([`times ${bench.contenders[i]}`, "times"]);
  }
  columns.push(["note", "text"]);
  const value = (cell, i) => {
    const entry = cell[ENTRIES][i];
    if (entry == null) return null;
    if (Array.isArray(entry)) return entry[US];
    return bench.reasons[entry].startsWith("wrong") ? "wrong" : "refuses";
  };
  const rows = cells.map((cell) => {
    const entry = cell[ENTRIES][OURS];
    const ours = Array.isArray(entry) ? entry : [];
    const row = [cell[ROWS], cell[COLS], value(cell, CEILING), value(cell, OURS), ours[P20], ours[P80],
      ours.length ? cell[BYTES] / ours[US] / 1e3 : null, ours[SHARE]];
    for (const i of others) {
      row.push(value(cell, i));
      if (isRival(i)) row.push(Array.isArray(cell[ENTRIES][i]) ? cell[ENTRIES][i][TIMES] : null);
    }
    return [...row, cellNote(cell)];
  });
  return { title, columns, rows, note: "times: how many times as fast ours is." };
}

function cellNote(cell) {
  const late = bench.contenders.filter((_, i) => Array.isArray(cell[ENTRIES][i]) && cell[ENTRIES][i][LATE]);
  return [cell[VALUES] === "normal" ? "" : `${cell[VALUES]} values`, has(cell, WARM) ? "L2 warm" : "",
    late.length ? `${late.join(", ")} by do_bench` : "", ...cell[SAID]].filter(Boolean).join("; ");
}

// ---- speed by columns

const MEASURES = [["share", "Share of the limit"], ["gbs", "GB/s"], ["us", "Time"]];

function speedFigure(place, id, ops) {
  const cells = bench.cells.filter((cell) => ops.includes(cell[OP]));
  if (!cells.length) return false;
  const found = ops.filter((op) => cells.some((cell) => cell[OP] === op));
  const state = { op: found[0], type: "", rows: "", measure: "share",
    off: new Set() };
  const types = () => [...new Set(cells.filter((c) => c[OP] === state.op).map((c) => c[TYPE]))];
  const mine = () => cells.filter((c) => c[OP] === state.op && c[TYPE] === state.type);
  const kinds = () => {
    const rows = [...new Set(mine().filter((c) => !has(c, LARGE)).map((c) => c[ROWS]))].sort((a, b) => a - b);
    const large = mine().some((c) => has(c, LARGE));
    return [large ? ["large", "large cells"] : ["all", "all cells"],
      ...rows.map((each) => [String(each), `${shown("count", each)} row${each === 1 ? "" : "s"}`])];
  };
  const drawn = () => mine().filter((c) => c[VALUES] === "normal" && (state.rows === "large" ? has(c, LARGE)
    : state.rows === "all" || (!has(c, LARGE) && c[ROWS] === Number(state.rows))))
    .sort((a, b) => a[COLS] - b[COLS]);
  const holders = Object.fromEntries(["type", "rows", "lines"].map((name) => [name, el("div")]));
  const settle = () => {
    if (!types().includes(state.type)) state.type = types()[0];
    holders.type.replaceChildren(choice("Type", types().map((t) => [t, t]), state.type, (v) => set("type", v)));
    settleRows();
  };
  const settleRows = () => {
    if (!kinds().some(([name]) => name === state.rows)) state.rows = kinds()[0][0];
    holders.rows.replaceChildren(choice("Rows", kinds(), state.rows, (v) => set("rows", v), true));
    lines();
  };
  const lines = () => {
    const there = bench.contenders.filter((_, i) => (i !== CEILING || state.measure !== "share")
      && drawn().some((cell) => timed(cell, i)));
    holders.lines.replaceChildren(toggles("Lines", there.map((name) => ({ value: name, text: called(name),
      on: !state.off.has(name), swatch: swatch(tone(name), mark(name)) })), (name, on) => {
      state.off[on ? "delete" : "add"](name);
      made.draw();
    }));
  };
  const set = (name, value) => {
    state[name] = value;
    if (name === "op") settle();
    else if (name === "type") settleRows();
    else lines();
    made.draw();
  };
  const marked = el("div");
  const made = figure({
    id, title: id === "losses" ? "Losses by columns" : "Ours and the rivals by columns",
    sheet: () => cellSheet(drawn(), `${state.op} ${state.type}`), after: [marked],
    controls: [choice("Operation", found.map((op) => [op, op]), state.op, (v) => set("op", v), found.length > 3 && isNarrow()),
      holders.type, holders.rows,
      choice("Shown", MEASURES, state.measure, (v) => set("measure", v)), holders.lines],
    plot: () => speedPlot(drawn(), state, marked),
  });
  settle();
  place.append(made.node);
  made.draw();
  return true;
}

// Points in pieces: null where the next width is far off, and was not measured.
function joined(points) {
  const out = [];
  points.forEach((point, i) => {
    if (i && point.x >= GAP * points[i - 1].x) out.push({ x: null, y: null });
    out.push(point);
  });
  return out;
}

function speedPlot(cells, state, marked) {
  const limit = bench.limits[state.op];
  const percent = (c, i) => { const share = timed(c, i)?.[SHARE]; return share == null ? null : 100 * share; };
  const value = { share: percent, gbs, us: (c, i) => timed(c, i)?.[US] }[state.measure];
  const text = { share: (y) => `${y.toFixed(1)} %`, gbs: (y) => shown("count", y), us: (y) => shown("us", y) }[state.measure];
  const unit = { share: ` of ${limit}`, gbs: " GB/s", us: " µs" }[state.measure];
  const traces = [];
  bench.contenders.forEach((name, i) => {
    if (state.off.has(name) || (name === "ceiling" && state.measure === "share")) return;
    const points = cells.filter((cell) => value(cell, i) != null).map((cell) => ({ x: cell[COLS], y: value(cell, i),
      cell, ragged: has(cell, RAGGED) }));
    const ours = name.startsWith("ours");
    for (const ragged of [false, true]) {
      const some = points.filter((point) => point.ragged === ragged);
      if (!some.length) continue;
      const shownPoints = ragged ? some : joined(some);
      traces.push({
        type: "scatter", mode: ragged ? "markers" : "lines+markers", name: plain(called(name)),
        x: shownPoints.map((p) => p.x), y: shownPoints.map((p) => p.y),
        line: { color: colour(tone(name)), width: ours ? 3 : 1.6, dash: name === "ceiling" ? "dot" : "solid" },
        marker: { symbol: mark(name) + (ragged ? "-open" : ""), size: ours ? 9 : 7, color: colour(tone(name)),
          line: { width: ragged ? 1.8 : 0, color: colour(tone(name)) } },
        hovertemplate: shownPoints.map((p) => (p.cell ? `<b>${plain(called(name))}</b> ${text(p.y)}${unit}`
          + `<br>${shape(p.cell)}${p.cell[SAID].map((each) => `<br>${plain(each)}`).join("")}<extra></extra>` : "")),
      });
    }
  });
  const said = cells.filter((cell) => cell[SAID].length && timed(cell, OURS));
  const rings = said.filter((cell) => value(cell, OURS) != null && !state.off.has("ours"));
  if (rings.length) {
    traces.push({ type: "scatter", mode: "markers", x: rings.map((c) => c[COLS]), y: rings.map((c) => value(c, OURS)),
      marker: { symbol: "circle-open", size: 16, color: colour("over"), line: { width: 2 } }, hoverinfo: "skip" });
  }
  const apart = bench.contenders.filter((name, i) => !state.off.has(name) && name !== "ceiling"
    && cells.some((c) => timed(c, i)) && cells.every((c) => value(c, i) == null));
  marksBox(marked, cells.filter((cell) => cell[SAID].length));
  const ys = traces.flatMap((trace) => trace.y).filter((y) => y != null);
  const isShare = state.measure === "share", isTime = state.measure === "us";
  const xs = [...new Set(cells.map((cell) => cell[COLS]))];
  const span = [Math.log10(Math.min(...xs) * 0.85), Math.log10(Math.max(...xs) * 1.18)];
  const ticks = Array.from({ length: 30 }, (_, n) => 2 ** n).filter((x) => Math.log10(x) >= span[0] && Math.log10(x) <= span[1]);
  const thin = ticks.filter((_, n) => !isNarrow() || n % 3 === 0);
  return {
    traces,
    layout: {
      height: isNarrow() ? 360 : 460, hovermode: "closest",
      xaxis: { type: "log", range: span, tickvals: thin, ticktext: thin.map(short), title: { text: "columns" } },
      yaxis: isTime ? { type: "log", title: { text: "µs" }, dtick: 1 }
        : isShare ? { range: [0, Math.max(108, ...ys) + 4], ticksuffix: " %", title: { text: `share of ${limit}'s speed` } }
          : { rangemode: "tozero", title: { text: "GB/s of the bytes that must move" } },
      shapes: isShare ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 100, y1: 100, line: { color: colour("limit"), width: 1.8 } }] : [],
      annotations: isShare ? [{ xref: "paper", x: 1, y: 100, yanchor: "bottom", xanchor: "right", text: `the limit: ${limit}`,
        showarrow: false, font: { color: colour("limit") } }] : [],
    },
    alt: `Lines: ${state.op} ${state.type} by columns, ours and ${bench.contenders.length - 2} others.`,
    caption: "Open marks: ragged columns, whose rows do not all begin on 16-byte boundaries."
      + (apart.length ? ` ${apart.map(called).join(", ")}: timed by do_bench alone, so without a share; see GB/s and Time.` : "")
      + (rings.length ? " Ringed: there is something to know, below." : "")
      + (cells.some((cell) => has(cell, WARM)) ? " Some of these buffers stay in L2: their GB/s are no figures of memory." : ""),
  };
}

function marksBox(holder, cells) {
  if (!cells.length) { holder.replaceChildren(); return; }
  const list = el("ul", { class: "marks" }, ...cells.map((cell) => el("li", {}, `${shape(cell)}: ${cell[SAID].join("; ")}`)));
  holder.replaceChildren(el("details", {}, el("summary", {}, `Marked: ${cells.length}`), list));
}
