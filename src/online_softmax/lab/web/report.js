// A report's page: each section is filled from the data, or goes away.
"use strict";

// ---- light or dark

function theme() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let wanted = remembered("theme") || "auto";
  const apply = () => {
    document.documentElement.dataset.theme = wanted === "auto" ? (dark.matches ? "dark" : "light") : wanted;
  };
  const set = (value) => {
    wanted = value;
    remember("theme", value);
    apply();
    for (const draw of redraws) draw();
  };
  apply();
  dark.addEventListener("change", () => { if (wanted === "auto") set("auto"); });
  const made = choice("Theme", [["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]], wanted, set);
  made.querySelector("legend").className = "unseen";
  for (const word of made.querySelectorAll("span")) worded(word, word.textContent);
  byId("switches").append(made);
}

// ---- the head

function head() {
  const days = data.dates.length > 1 ? `${data.dates[0]} to ${data.dates.at(-1)}` : data.dates[0];
  const cells = data.cells ? `${counted(data.cells, "cell")} of ${counted(data.operations, "operation")}` : "";
  const runs = data.ladder.length ? `${counted(data.ladder.length, "climb")} of the ladder` : "";
  const what = [cells, runs].filter(Boolean).join(" and ");
  byId("lead").append(`${[what || "What was stored", days && `measured on ${days}`].filter(Boolean).join(", ")}. `,
    titled("How far each kernel, and each rival, is from what the machine allows; where it falls short; and the table behind every figure."));
  for (const tile of data.tiles) {
    byId("tiles").append(el("div", {}, el("dt", {}, tile.of), el("dd", { class: "value" }, tile.value),
      el("dd", { class: "said" }, tile.note)));
  }
  byId("tiles").hidden = !data.tiles.length;
}

// ---- sections of facts and tables

function machine(place) {
  const sheet = data.sheets.machine;
  if (sheet) {
    const values = (i) => [...new Set(sheet.rows.map((row) => row[i]).filter((v) => v != null && v !== ""))];
    const facts = sheet.columns.slice(0, 8).map(([name, kind], i) => [name, values(i).map((v) => shown(kind, v)).join(", ")]);
    place.append(el("dl", { class: "facts" }, ...facts.filter(([, text]) => text).map(([name, text]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, text)))));
  }
  if (data.circumstances.length) {
    place.append(el("details", {}, worded(el("summary"), "How each part was measured"),
      el("ul", { class: "lines" }, ...data.circumstances.map((line) => el("li", {}, line)))));
  }
  if (sheet) place.append(tableBox("machine", () => sheet, { title: "Table of runs" }).node);
  return Boolean(sheet);
}

// Tables of text, the first open; those that share a title's beginning one after another.
function texts(place, name, openFirst = false) {
  const sheets = data.texts[name] || [];
  sheets.forEach((sheet, i) => {
    place.append(tableBox(`${name}-${i + 1}`, () => sheet, { open: openFirst && i === 0, title: sheet.title }).node);
  });
  return sheets.length > 0;
}

function refusals(place) {
  const marked = data.sheets.marks;
  if (marked) {
    const counts = {};
    for (const row of marked.rows) counts[row[5]] = (counts[row[5]] || 0) + 1;
    const said = Object.entries(counts).map(([word, count]) => `${shown("count", count)} ${word}`).join(", ");
    place.append(worded(el("h3"), "Marked cells"), el("p", { class: "note" }, `${said}. `,
      titled("What is marked impossible is not drawn.")),
    tableBox("marks", () => marked, { title: "Marked cells, with the reason" }).node);
  }
  const there = (data.texts.refusals || []).length > 0;
  if (there) place.append(worded(el("h3"), "Without a time, or timed by do_bench alone"));
  texts(place, "refusals");
  if (!marked && !there) place.append(worded(el("p", { class: "note" }), "None: everything that was asked ran, and no figure is marked."));
  return true;
}

function reading(place) {
  const ofCpu = data.devices.length > 0 && data.devices.every((name) => name.endsWith(", a CPU"));
  const lines = [
    "The limit of an operation is a kernel that moves the same bytes and computes nothing, timed in the same rounds: a copy, an addition, a read; of attention's forward and backward, one matrix product of as many operations.",
    ofCpu ? "All of it was timed on a CPU, and no figure says anything of a GPU. A time is the least of all calls, not a median: p20 and p80 lie above it."
      : "Times are medians; p20 and p80 stand beside them in the tables.",
    "Every contender was compared with float64 first: what is wrong has no time.",
    "A cell a little above 100 % is marked with the reason. One above what the memory delivers is marked impossible, and is no result.",
    ...ofCpu ? [] : ["Throttled: the GPU's own counters say that its clock was held down while the cell was timed."],
    "Drag over a figure to look closer, double-click to go back. CSV has the figures that a plot shows, times to seven digits.",
  ];
  place.append(el("ul", { class: "lines" }, ...lines.map((line) => worded(el("li"), line))));
  const whole = worded(el("button", { type: "button",
    onclick: () => download("online-softmax-cells.csv", `\ufeff${csv(everything())}`, "text/csv") }), "All cells as CSV");
  if (bench.cells.length) place.append(el("p", {}, whole));
  if (data.passed.length) place.append(el("ul", { class: "lines" }, ...data.passed.map((line) => el("li", {}, line))));
  byId("foot").append(titled("Made by online-softmax report from"), ` ${counted(data.files.length, "file")}: ${data.files.join(", ")}.`);
  return true;
}

// Every contender of every cell, a line each.
function everything() {
  const columns = ["operation", "type", "rows", "columns", "values", "contender", "median_us", "p20_us", "p80_us", "gb_s",
    "of_limit", "clock", "note"].map((name) => [name, "text"]);
  const rows = bench.cells.flatMap((cell) => bench.contenders.flatMap((name, i) => {
    const entry = cell[ENTRIES][i];
    if (entry == null) return [];
    const first = [cell[OP], cell[TYPE], cell[ROWS], cell[COLS], cell[VALUES], name];
    if (!Array.isArray(entry)) return [[...first, null, null, null, null, null, null, bench.reasons[entry]]];
    const speed = Number((cell[BYTES] / entry[US] / 1e3).toPrecision(6));
    return [[...first, entry[US], entry[P20], entry[P80], speed, entry[SHARE], entry[LATE] ? "do_bench" : "graph",
      i === OURS ? cell[SAID].join("; ") : ""]];
  }));
  return { title: "All cells", columns, rows };
}

// ---- the page

const SECTIONS = {
  machine,
  ladder: ladderFigures,
  roofline: rooflineFigure,
  speed: (place) => speedFigure(place, "speed", bench.ops.filter((op) => !bench.losses.includes(op))),
  few: (place) => { const there = fewFigure(place); if (there) texts(place, "few"); return there; },
  accuracy: accuracyFigure,
  memory: memoryFigures,
  attention: attentionFigures,
  losses: (place) => { const there = speedFigure(place, "losses", bench.losses); return texts(place, "losses") || there; },
  host: (place) => { const there = hostFigure(place); return texts(place, "host") || there; },
  verdicts: (place) => texts(place, "verdicts", true),
  refusals,
  reading,
};

function contents() {
  const links = new Map();
  for (const section of document.querySelectorAll("main > section[id]:not(.hero):not([hidden])")) {
    const link = worded(el("a", { href: `#${section.id}` }), section.querySelector("h2").dataset.said);
    links.set(section, link);
    byId("contents").append(el("li", {}, link));
  }
  const watcher = new IntersectionObserver((seen) => {
    for (const each of seen) {
      if (!each.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(each.target).setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-30% 0px -65% 0px" });
  for (const section of links.keys()) watcher.observe(section);
}

languages(byId("switches"));
theme();
head();
for (const [id, fill] of Object.entries(SECTIONS)) byId(id).hidden = !fill(byId(id));
contents();
let wasNarrow = isNarrow();
window.addEventListener("resize", () => {
  if (isNarrow() === wasNarrow) return;
  wasNarrow = isNarrow();
  for (const draw of redraws) draw();
});
document.documentElement.dataset.ready = "yes";
