// Few rows, accuracy, memory, attention, host.
"use strict";

// ---- few rows: a heat map of how many times as fast

const FASTEST = "the fastest rival";

function fewFigure(place) {
  const cells = bench.cells.filter((c) => has(c, FEW) && !has(c, LARGE) && c[VALUES] === "normal" && timed(c, OURS));
  if (!cells.length) return false;
  const rivals = bench.contenders.filter((name, i) => i !== CEILING && !name.startsWith("ours"));
  const ops = [...new Set(cells.map((c) => c[OP]))];
  const state = { op: ops[0], type: "", rival: FASTEST };
  const types = () => [...new Set(cells.filter((c) => c[OP] === state.op).map((c) => c[TYPE]))];
  const mine = () => cells.filter((c) => c[OP] === state.op && c[TYPE] === state.type);
  const holder = el("div");
  const settle = () => {
    if (!types().includes(state.type)) state.type = types()[0];
    holder.replaceChildren(choice("Type", types().map((t) => [t, t]), state.type, (v) => { state.type = v; made.draw(); }));
  };
  const made = figure({
    id: "few-rows", title: "Times as fast on few rows",
    sheet: () => cellSheet(mine(), `${state.op} ${state.type}, few rows`), legend: scale(),
    controls: [choice("Operation", ops.map((op) => [op, op]), state.op,
      (v) => { state.op = v; settle(); made.draw(); }, ops.length > 3 && isNarrow()), holder,
    choice("Beside", [FASTEST, ...rivals].map((name) => [name, name === FASTEST ? name : called(name)]), FASTEST,
      (v) => { state.rival = v; made.draw(); }, isNarrow())],
    plot: () => heatMap(mine(), state, rivals),
  });
  settle();
  place.append(made.node);
  made.draw();
  return true;
}

function scale() {
  const bar = "width: min(16rem, 60vw); height: 0.7rem; border-radius: 3px; display: inline-block;"
    + "background: linear-gradient(90deg, var(--low), var(--mid), var(--high))";
  return el("p", { class: "note" }, "¼ ", el("span", { style: bar }), " 4 times as fast");
}

// What a cell has beside a rival; beside the fastest, the least.
function beside(cell, rival, rivals) {
  const names = rival === FASTEST ? rivals : [rival];
  const found = names.map((name) => [name, timed(cell, bench.contenders.indexOf(name))?.[TIMES]])
    .filter(([, times]) => times);
  return found.sort((a, b) => a[1] - b[1])[0] || null;
}

function heatMap(cells, state, rivals) {
  const up = (a, b) => a - b;
  const rows = [...new Set(cells.map((c) => c[ROWS]))].sort(up);
  const cols = [...new Set(cells.map((c) => c[COLS]))].sort(up);
  const at = new Map(cells.map((c) => [`${c[ROWS]} ${c[COLS]}`, c]));
  const flat = isNarrow(); // columns of the matrix go down there, where there is room
  const [across, down] = flat ? [rows, cols] : [cols, rows];
  const cellAt = (a, d) => at.get(flat ? `${a} ${d}` : `${d} ${a}`);
  const found = down.map((d) => across.map((a) => {
    const cell = cellAt(a, d);
    return { cell, best: cell ? beside(cell, state.rival, rivals) : null };
  }));
  const grid = (value) => found.map((line) => line.map(value));
  const name = (count) => (count === 1024 || (count > 1024 && count % 1024 === 0) ? short(count) : shown("count", count));
  const known = found.flat().filter((each) => each.best);
  const late = known.filter((each) => each.best[1] < 1);
  const alone = known.filter(({ cell }) => rivals.filter((rival) => timed(cell, bench.contenders.indexOf(rival))).length === 1);
  const limit = Math.log2(4);
  return {
    traces: [{
      type: "heatmap", x: across.map((a) => name(a)), y: down.map((d) => name(d)),
      z: grid(({ best }) => (best ? Math.log2(best[1]) : null)), zmin: -limit, zmid: 0, zmax: limit,
      colorscale: [[0, colour("low")], [0.5, colour("mid")], [1, colour("high")]], showscale: false,
      xgap: 2, ygap: 2, text: grid(({ best }) => (best ? best[1].toFixed(best[1] < 9.95 ? 2 : 1) : "")),
      texttemplate: "%{text}", textfont: { size: flat ? 10 : 11.5, color: colour("ink") }, hoverongaps: false,
      hovertext: grid(({ cell, best }) => (best ? `<b>${shape(cell)}</b><br>${shown("us", timed(cell, OURS)[US])} µs,`
        + ` ${shown("times", best[1])} times ${plain(called(best[0]))}` : "not measured")),
      hovertemplate: "%{hovertext}<extra></extra>",
    }],
    layout: {
      height: flat ? 60 + 24 * down.length : 90 + 42 * down.length,
      xaxis: { type: "category", title: { text: flat ? "rows" : "columns" }, side: flat ? "top" : "bottom",
        tickangle: flat ? 0 : -45, showgrid: false },
      yaxis: { type: "category", title: { text: flat ? "columns" : "rows" }, autorange: "reversed", showgrid: false },
      margin: { l: 8, r: 8, t: flat ? 40 : 12, b: 8 },
    },
    alt: `Heat map: ${state.op} ${state.type}, times as fast as ${state.rival}, by rows and columns; `
      + `${late.length} of ${counted(known.length, "cell")} slower, by however little.`,
    caption: `${late.length} of ${counted(known.length, "cell")} slower than ${state.rival === FASTEST ? FASTEST : called(state.rival)}, by however little. `
      + (state.rival === FASTEST && alone.length && alone.length < known.length ? `In ${alone.length} of the ${known.length} one rival alone has a time: hence the stripes. ` : "")
      + "An empty place was not measured, or that rival has no time there.",
  };
}

// ---- accuracy: the largest error over the sizes, ours and torch's

function accuracyFigure(place) {
  const sheet = data.sheets.accuracy;
  if (!sheet) return false;
  const types = [...new Set(sheet.rows.map((row) => row[1]))];
  let type = types.includes("float32") ? "float32" : types[0];
  const mine = () => sheet.rows.filter((row) => row[1] === type);
  const made = figure({
    id: "accuracy", title: "Largest error, ours and torch's", sheet: () => ({ ...sheet, rows: mine() }),
    legend: key([["ours", called("ours"), "circle"], ["torch", "torch", "square"]]),
    controls: [choice("Type", types.map((t) => [t, t]), type, (v) => { type = v; made.draw(); })],
    plot: () => {
      const groups = new Map();
      for (const row of mine()) {
        const name = plain(`${row[0]}, ${row[2]}`);
        const [ours, torch] = groups.get(name) || [0, 0];
        groups.set(name, [Math.max(ours, row[5]), Math.max(torch, row[6])]);
      }
      const names = [...groups.keys()], pairs = [...groups.values()];
      const dots = (i, tone, symbol, size) => ({ type: "scatter", mode: "markers", y: names, x: pairs.map((p) => p[i]),
        marker: { color: colour(tone), symbol, size, line: { width: 2, color: colour(tone) } },
        hovertemplate: `%{y}: %{x:.2e}, ${i ? "torch" : "ours"}<extra></extra>` });
      const late = mine().filter((row) => row[9] !== "yes").length;
      const known = pairs.flat().filter((value) => value > 0);
      const ends = [Math.min(...known) * 0.6, Math.max(...known) * 1.6];
      const between = { type: "scatter", mode: "lines", y: names.flatMap((name) => [name, name, null]),
        x: pairs.flatMap(([ours, torch]) => [ours, torch, null]), line: { color: colour("line"), width: 3 }, hoverinfo: "skip" };
      return {
        traces: [between, dots(1, "torch", "square-open", 12), dots(0, "ours", "circle", 7)],
        layout: { height: 70 + 26 * names.length,
          xaxis: { type: "log", title: { text: "largest error" }, ...decades(...ends) },
          yaxis: { autorange: "reversed", tickfont: { size: isNarrow() ? 10 : 12 }, ticksuffix: " " } },
        alt: `Dots: largest errors in ${type} by operation and input, ours beside torch's.`,
        caption: `In ${mine().length - late} of ${mine().length} lines ours is at most torch's + 2⁻²³. ${sheet.note}`,
      };
    },
  });
  place.append(made.node);
  made.draw();
  return true;
}

// ---- memory: time against bytes

const TIMES_MS = [1, 2, 5, 10, 20, 30, 40, 50, 70, 100, 150, 200, 500, 1000];

function memoryFigure(place) {
  const sheet = data.sheets.memory;
  if (!sheet) return false;
  const timedRows = sheet.rows.filter((row) => row[2] != null && row[3] != null);
  const products = sheet.rows.filter((row) => row[2] != null && row[3] == null);
  const refused = sheet.rows.filter((row) => row[2] == null);
  if (!timedRows.length) return false;
  // Names of points that lie close together go to different sides.
  const sides = new Map();
  [...timedRows].sort((a, b) => a[3] - b[3]).forEach((row, i, all) => {
    const isClose = i && Math.log10(row[3] / all[i - 1][3]) < 0.4;
    const before = isClose ? sides.get(all[i - 1]) : "";
    const next = i + 1 < all.length && Math.log10(all[i + 1][3] / row[3]) < 0.4;
    sides.set(row, !i ? "middle right" : before === "bottom left" ? "top center" : before ? "bottom right" : next ? "bottom left" : "top center");
  });
  const made = figure({
    id: "memory", title: `linear_cross_entropy, ${sheet.rows[0][0]}`, sheet: () => sheet,
    plot: () => ({
      traces: timedRows.map((row) => ({
        type: "scatter", mode: "markers+text", x: [row[3] / 1e9], y: [row[2]], text: [plain(row[1])],
        textposition: sides.get(row), textfont: { color: colour("ink"), size: isNarrow() ? 10.5 : 12.5 },
        marker: { size: row[1].startsWith("ours") ? 15 : 11, color: colour(tone(row[1])),
          symbol: row[1].startsWith("ours") ? "circle" : "square" },
        hovertemplate: `<b>${plain(row[1])}</b><br>${shown("ms", row[2])} ms, ${shown("gigabytes", row[3])} GB<extra></extra>`,
      })),
      layout: {
        height: isNarrow() ? 380 : 440,
        xaxis: { type: "log", title: { text: "GB beyond inputs and gradients" }, tickvals: [0.001, 0.01, 0.1, 1, 10],
          ticktext: ["0.001", "0.01", "0.1", "1", "10"], range: [-3.9, isNarrow() ? 1.7 : 1.3] },
        yaxis: { type: "log", title: { text: "ms" }, tickvals: TIMES_MS, ticktext: TIMES_MS.map(String) },
        shapes: products.map((row) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: row[2], y1: row[2],
          line: { color: colour("limit"), width: 1.5, dash: "dot" } })),
        annotations: products.map((row, i) => ({ xref: "paper", x: 0.01, xanchor: "left", y: Math.log10(row[2]), text: `${plain(row[1])} alone`,
          yanchor: i ? "bottom" : "top", showarrow: false, font: { color: colour("limit"), size: 11.5 } })),
      },
      alt: "Points: milliseconds of linear_cross_entropy against gigabytes, a point a contender.",
      caption: [`Lower and further left is better. ${sheet.note}`, ...refused.map((row) => `Without a time: ${row[1]}, ${row[9]}.`)].join(" "),
    }),
  });
  place.append(made.node);
  made.draw();
  return true;
}

// ---- attention and merges: bars side by side, a bar a contender; of memory, a bar a pass

const MOST_GROUPS = 9; // of bars in one plot; more are parted by what they have in common

const UNITS = ["TFLOP/s", "GB/s", "MB"]; // behind the names of columns that are bars

function fusedFigure(place, id) {
  const sheet = data.sheets[id];
  const unit = UNITS.find((each) => sheet.columns.some(([name]) => name.endsWith(` ${each}`)));
  const at = sheet.columns.map(([name], i) => (name.endsWith(` ${unit}`) ? i : -1)).filter((i) => i >= 0)
    .filter((i) => sheet.rows.some((row) => row[i] != null));
  const labels = at.map((i) => sheet.columns[i][0].slice(0, -unit.length - 1));
  const groups = [...new Set(sheet.rows.map((row) => row[0]))];
  const isParted = sheet.rows.length > MOST_GROUPS && groups.length > 1;
  let group = groups[0];
  const off = new Set();
  const mine = () => (isParted ? sheet.rows.filter((row) => row[0] === group) : sheet.rows);
  const bars = toggles("Bars", labels.map((label) => ({ value: label, text: called(label), on: true,
    swatch: swatch(tone(label), "square") })), (label, on) => { off[on ? "delete" : "add"](label); made.draw(); });
  const parted = choice("Of", groups.map((each) => [each, each]), group, (v) => { group = v; made.draw(); }, true);
  const named = (row) => (isParted || groups.length === 1 ? plain(row[1]) : `${plain(row[0])}<br>${plain(row[1])}`);
  const made = figure({
    id: id.replaceAll("_", "-"), title: sheet.title, sheet: () => ({ ...sheet, rows: mine() }),
    controls: isParted ? [parted, bars] : [bars],
    plot: () => {
      const shownAt = at.filter((_, j) => !off.has(labels[j]));
      const rows = mine();
      const text = (value) => (value == null ? "" : value >= 10 ? shown("count", value) : value.toPrecision(2));
      return {
        traces: shownAt.map((i) => ({
          type: "bar", orientation: "h", name: plain(labels[at.indexOf(i)]), y: rows.map(named), x: rows.map((row) => row[i]),
          marker: { color: colour(tone(labels[at.indexOf(i)])) }, text: rows.map((row) => text(row[i])),
          textposition: "auto", constraintext: "none", insidetextanchor: "end", textangle: 0, textfont: { size: 10.5 },
          hovertemplate: `<b>${plain(called(labels[at.indexOf(i)]))}</b><br>%{y}: %{x:,.4~r} ${unit}<extra></extra>`,
        })),
        layout: { barmode: "group", bargap: 0.24, bargroupgap: 0.06,
          height: 60 + rows.length * (16 + 19 * Math.max(shownAt.length, 1)),
          xaxis: { title: { text: unit }, rangemode: "tozero", nticks: isNarrow() ? 5 : 9 },
          yaxis: { autorange: "reversed", type: "category", ticklabelstandoff: 8, gridcolor: "rgba(0,0,0,0)" } },
        alt: `Bars: ${unit}, ${sheet.title}: ${labels.map(called).join(", ")}.`,
        caption: [groups.length === 1 ? `${group}.` : "", sheet.note].filter(Boolean).join(" "),
      };
    },
  });
  place.append(made.node);
  made.draw();
}

function memoryFigures(place) {
  const there = memoryFigure(place);
  if (!data.sheets.attention_memory) return there;
  fusedFigure(place, "attention_memory");
  return true;
}

function attentionFigures(place) {
  for (const id of data.fused) fusedFigure(place, id);
  return data.fused.length > 0;
}

function hostFigure(place) {
  const sheet = data.sheets.host;
  if (!sheet) return false;
  const kinds = [...new Set(sheet.rows.map((row) => row[1]))];
  let kind = kinds[0];
  const mine = () => sheet.rows.filter((row) => row[1] === kind && row[2] != null);
  const made = figure({
    id: "host", title: sheet.title, sheet: () => sheet,
    controls: [choice("Gradient", kinds.map((each) => [each, each]), kind, (v) => { kind = v; made.draw(); })],
    plot: () => ({
      traces: [{ type: "bar", orientation: "h", y: mine().map((row) => plain(called(row[0]))), x: mine().map((row) => row[2]),
        marker: { color: mine().map((row) => colour(tone(row[0]))) },
        error_x: { type: "data", symmetric: false, array: mine().map((row) => row[4] - row[2]),
          arrayminus: mine().map((row) => row[2] - row[3]), color: colour("soft"), thickness: 1.4 },
        hovertemplate: "%{y}: %{x:.1f} µs<extra></extra>" }],
      layout: { height: 70 + 34 * mine().length, xaxis: { title: { text: "µs of the host" }, rangemode: "tozero" },
        yaxis: { autorange: "reversed", ticksuffix: "  ", gridcolor: "rgba(0,0,0,0)" } },
      alt: "Bars: microseconds of the host for an eager call of softmax, ours and others.",
      caption: "Whiskers: from the 20th to the 80th percentile of batches.",
    }),
  });
  place.append(made.node);
  made.draw();
  return true;
}
