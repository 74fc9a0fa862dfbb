// The ladder, its roofline and the counters' bytes.
"use strict";

const KINDS = { cuda: "CUDA C++", triton: "Triton", torch: "PyTorch", production: "what softmax() picked in that run" };
const kindTone = (kind) => (["cuda", "triton", "production"].includes(kind) ? kind : "torch");

function ladderFigures(place) {
  const runs = data.ladder;
  if (!runs.length) return false;
  let at = 0;
  const list = el("ol", { class: "rungs" });
  const kinds = [...new Set(runs.flatMap((run) => run.rungs.map((rung) => rung.kind)))];
  const made = figure({
    id: "ladder", title: "Every rung beside a copy", sheet: () => runs[at].sheet,
    controls: [choice("Matrix and type", runs.map((run, i) => [String(i), run.size]), "0",
      (value) => { at = Number(value); made.draw(); }, true)],
    legend: key(kinds.map((kind) => [kindTone(kind), own(KINDS, kind) || kind])),
    plot: () => {
      changes(list, runs[at]);
      return runs[at].timed ? speedBars(runs[at]) : costBars(runs[at]);
    },
  });
  place.append(made.node, el("h3", {}, "What each rung changed"), list);
  made.draw();
  trafficFigures(place);
  return true;
}

// Of each rung: its idea, and what it costs beside the rung before it.
function changes(list, run) {
  const kinds = new Map(run.rungs.map((rung) => [rung.name, rung.kind]));
  const rungs = run.sheet.rows.filter((row) => row[2] || ["cuda", "triton"].includes(kinds.get(row[0])));
  list.replaceChildren(...rungs.map((row) => {
    const edge = `border-color: var(--${kindTone(kinds.get(row[0]))})`;
    return el("li", { style: edge }, el("b", {}, row[0]), el("span", {}, row[1]),
      row[2] ? el("small", {}, row[2]) : null);
  }));
}

const barHeight = (count) => 60 + count * (isNarrow() ? 27 : 33);
const rungName = (rung) => `<span style="font-family:monospace">${plain(rung.name)}</span>`;

function speedBars(run) {
  const drawn = run.rungs.filter((rung) => rung.isResult);
  const most = 100 * Math.max(1, ...drawn.map((rung) => rung.share));
  const label = (rung) => {
    const share = `<b>${(100 * rung.share).toFixed(rung.share < 0.1 ? 1 : 0)} %</b>`;
    return isNarrow() ? share : `${share}   ${shown("us", rung.us)} µs`;
  };
  const bars = {
    type: "bar", orientation: "h", y: drawn.map(rungName), x: drawn.map((rung) => 100 * rung.share),
    marker: { color: drawn.map((rung) => colour(kindTone(rung.kind))),
      line: { width: drawn.map((rung) => (rung.marks.length ? 2.5 : 0)), color: colour("over") } },
    text: drawn.map(label), textposition: "auto", insidetextanchor: "end", constraintext: "none",
    textfont: { size: isNarrow() ? 11 : 12.5 }, textangle: 0,
    hovertemplate: drawn.map((rung) =>
      `<b>${plain(rung.name)}</b><br>${plain(rung.idea)}<br>${shown("us", rung.us)} µs, ${shown("count", rung.gbs)} GB/s`
      + `${rung.marks.map((mark) => `<br>${plain(mark)}`).join("")}<extra></extra>`),
  };
  const copy = `copy: ${shown("count", run.copy)} GB/s`;
  const past = run.rungs.filter((rung) => !rung.isResult).map((rung) => `${rung.name}: ${rung.marks[0]}`);
  const best = drawn.reduce((a, b) => (b.share > a.share ? b : a), drawn[0] || { name: NONE });
  return {
    traces: [bars],
    layout: {
      height: barHeight(drawn.length), margin: { l: 8, r: 12, t: 26, b: 8 },
      xaxis: { range: [0, most * 1.03], ticksuffix: " %" },
      yaxis: { autorange: "reversed", gridcolor: "rgba(0,0,0,0)", ticksuffix: " ",
        tickfont: { color: colour("ink") } },
      shapes: [{ type: "line", x0: 100, x1: 100, y0: 0, y1: 1, yref: "paper",
        line: { color: colour("limit"), width: 1.8 } }],
      annotations: [{ x: 100, xanchor: "right", y: 1, yref: "paper", yanchor: "bottom", text: copy,
        showarrow: false, font: { color: colour("limit") } }],
    },
    alt: `Bars: softmax of ${run.size} on ${run.device}, share of a copy's speed by rung; the `
      + `fastest is ${best.name} with ${shown("share", best.share)}.`,
    caption: [...run.notes, ...past].join(" "),
  };
}

// Without times: what each rung reads, writes and raises, an element.
function costBars(run) {
  const names = run.rungs.map(rungName);
  const bar = (name, key, tone) => ({
    type: "bar", orientation: "h", name, y: names, x: run.rungs.map((rung) => rung[key]),
    marker: { color: colour(tone) },
    hovertemplate: `%{y}: %{x:.3~f} ${name} an element<extra></extra>`,
  });
  const exps = {
    type: "scatter", mode: "markers", name: "exponentials", y: names,
    x: run.rungs.map((rung) => rung.exps),
    marker: { symbol: "diamond", size: 9, color: colour("limit") },
    hovertemplate: "%{y}: %{x:.3~f} exponentials an element<extra></extra>",
  };
  return {
    traces: [bar("reads", "reads", "cuda"), bar("writes", "writes", "writes"), exps],
    layout: {
      barmode: "stack", height: barHeight(names.length) + 30, showlegend: true,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, margin: { l: 8, r: 12, t: 40, b: 8 },
      xaxis: { title: { text: "an element" } },
      yaxis: { autorange: "reversed", gridcolor: "rgba(0,0,0,0)", ticksuffix: " " },
    },
    alt: `Bars: reads, writes and exponentials an element of each rung, softmax of ${run.size}; counted, not timed.`,
    caption: run.notes.join(" "),
  };
}

// ---- roofline: both types of one shape in one plot

function rooflineFigure(place) {
  const roofs = data.ladder.filter((run) => run.roof);
  if (!roofs.length) return false;
  const shape = (run) => run.size.replace(/ \S+$/, "");
  const shapes = [...new Set(roofs.map(shape))];
  let at = shapes[0];
  const now = () => roofs.filter((run) => shape(run) === at);
  const sheet = () => {
    const [first, ...more] = now();
    const type = (run) => run.size.split(" ").pop();
    const rows = [first, ...more].flatMap((run) => run.roofSheet.rows.map((row) => [type(run), ...row]));
    return { ...first.roofSheet, columns: [["type", "text"], ...first.roofSheet.columns], rows };
  };
  const made = figure({
    id: "roofline", title: "Exponentials a second, and a byte", sheet,
    controls: [choice("Matrix", shapes.map((each) => [each, each]), at,
      (value) => { at = value; made.draw(); }, isNarrow())],
    plot: () => rooflinePlot(now(), at),
  });
  place.append(made.node);
  made.draw();
  return true;
}

const SHORT = { triton_two_pass: "two_pass", triton_online: "t_online", production: "" };
const shortRung = (name) => own(SHORT, name) ?? plain(name.split("_")[0]); // "production" lies on the rung that it is
const tint = (point) => colour(kindTone(point.kind));

function rooflinePlot(runs, shape) {
  const [first] = runs;
  const xs = runs.flatMap((run) => run.roof.points.map((point) => point.x));
  const ys = runs.flatMap((run) => run.roof.points.map((point) => point.y));
  const low = Math.min(...xs) * 0.72, high = Math.max(...xs) * 1.5;
  const peak = first.roof.exps;
  const traces = [];
  const lines = [];
  const roof = (gbs, name, dash, tone) => {
    const top = peak ? Math.min(high, peak / (gbs * 1e9)) : high;
    lines.push([low, low * gbs * 1e9, top, top * gbs * 1e9]);
    traces.push({ type: "scatter", mode: "lines", x: [low, top], y: [low * gbs * 1e9, top * gbs * 1e9],
      line: { color: colour(tone), width: 2, dash }, hoverinfo: "skip", name });
  };
  roof(first.roof.copy, "a copy", "solid", "limit");
  if (first.roof.datasheet) roof(first.roof.datasheet, "datasheet", "dot", "soft");
  if (peak) {
    lines.push([low, peak, high, peak]);
    traces.push({ type: "scatter", mode: "lines", x: [low, high], y: [peak, peak], name: "units",
      line: { color: colour("triton"), width: 2, dash: "dash" }, hoverinfo: "skip" });
  }
  runs.forEach((run, i) => {
    const type = run.size.split(" ").pop();
    const points = run.roof.points;
    traces.push({
      type: "scatter", mode: "markers", name: plain(type),
      x: points.map((point) => point.x), y: points.map((point) => point.y),
      marker: { size: 10, symbol: i ? "circle-open" : "circle", color: points.map(tint),
        line: { width: 2, color: points.map(tint) } },
      hovertemplate: points.map((point) => `<b>${plain(point.name)}</b>, ${plain(type)}<br>`
        + `${shown("count", point.y / 1e9)} billion exponentials a second<br>`
        + `${shown("number", point.x)} a byte<extra></extra>`),
    });
  });
  const log = Math.log10;
  const bottom = Math.min(...ys) * 0.6, top = (peak || Math.max(...ys)) * 2.2;
  const label = (x, y, text, tone, xanchor, yanchor = "bottom") => ({ x: log(x), y: log(y), text, xanchor, yanchor,
    showarrow: false, font: { color: colour(tone), size: isNarrow() ? 11 : 12 } });
  const start = low * first.roof.copy * 1e9;
  const notes = isNarrow() ? [] : [label(low, start * 0.93, `a copy, ${shown("count", first.roof.copy)} GB/s`, "limit", "left", "top")];
  if (peak) notes.push(label(high, peak, "units for exponentials", "triton", "right"));
  const types = runs.map((run, i) => `${i ? "rings" : "Discs"}: ${run.size.split(" ").pop()}`);
  return {
    traces,
    layout: {
      height: isNarrow() ? 380 : 500, annotations: notes,
      xaxis: { type: "log", range: [log(low), log(high)], title: { text: "exponentials a byte that must move" },
        tickvals: [0.125, 0.25, 0.5, 1, 2], ticktext: ["⅛", "¼", "½", "1", "2"] },
      yaxis: { type: "log", range: [log(bottom), log(top)], title: { text: "exponentials a second" },
        tickvals: [1e10, 3e10, 1e11, 3e11, 1e12, 3e12],
        ticktext: ["10 G", "30 G", "100 G", "300 G", "1 T", "3 T"] },
    },
    alt: `Roofline of the rungs on ${shape}: exponentials a second against exponentials a byte.`,
    caption: `${types.join("; ")}. Dotted: the datasheet's bandwidth. ${first.roofSheet.note}`,
    labels: {
      points: runs.flatMap((run) => run.roof.points.map(({ x, y, name }) => ({ x, y, text: shortRung(name) }))),
      lines, notes, size: isNarrow() ? 10 : 11,
    },
  };
}

// ---- bytes at each level, by the GPU's counters

function trafficFigures(place) {
  const tones = ["writes", "cuda", "limit", "soft"];
  const symbols = ["circle", "square", "diamond", "triangle-down"];
  data.traffic.forEach((sheet, i) => {
    const levels = sheet.columns.slice(1, -1).map(([name]) => name);
    const names = sheet.rows.map((row) => rungName({ name: row[0] }));
    const values = sheet.rows.flatMap((row) => row.slice(1, -1)).filter((value) => value > 0);
    const least = Math.log2(Math.min(...values)), most = Math.log2(Math.max(...values));
    const ticks = Array.from({ length: 12 }, (_, n) => 2 ** n);
    const made = figure({
      id: `bytes-${i}`, title: sheet.title, sheet: () => sheet,
      legend: key(levels.map((name, j) => [tones[j], name, symbols[j]])),
      plot: () => ({
        traces: levels.map((name, j) => ({
          type: "scatter", mode: "markers", name, y: names, x: sheet.rows.map((row) => row[j + 1]),
          marker: { color: colour(tones[j]), symbol: symbols[j], size: 13 - 2 * j },
          hovertemplate: `%{y}: %{x:.1f} bytes, ${name}<extra></extra>`,
        })),
        layout: { height: 60 + 28 * names.length,
          xaxis: { type: "log", title: { text: "bytes an element" }, tickvals: ticks, ticktext: ticks.map(String),
            range: [(least - 0.3) * Math.log10(2), (most + 0.3) * Math.log10(2)] },
          yaxis: { autorange: "reversed", ticksuffix: " ", tickfont: { color: colour("ink") } } },
        alt: `Dots: ${sheet.title}, by level of memory, a line a rung.`, caption: sheet.note,
      }),
    });
    place.append(made.node);
    made.draw();
  });
}
