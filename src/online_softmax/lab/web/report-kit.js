// What the figures of a report share: elements, switches, tables, downloads, colours, numbers.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const NONE = "—";
const WORDS = ["text", "code"]; // kinds of columns that are words
const redraws = []; // one for each figure: drawn anew when the theme or the width changes

// ---- elements

function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.filter((each) => each != null));
  return made;
}

// What a reader chose, kept for the next page; a page that is a file may not.
const remembered = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
const remember = (name, value) => { try { localStorage.setItem(name, value); } catch { /* as said */ } };

// What a map of this page has under a word of the data, which may be any word.
const own = (map, word) => (Object.hasOwn(map, word) ? map[word] : undefined);
// A word of the data where Plotly would take markup, or a place to fill in.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%(?=\{)/g, "&#37;");
const byId = (id) => document.getElementById(id);
const isNarrow = () => window.innerWidth < 640;
const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// ---- numbers, by the rules of lab/reportsheet.py

const grouped = (text) => text.replace(/\B(?=(\d{3})+(?!\d))/g, ",");
const fixed = (value, digits) => {
  const [whole, part] = Math.abs(value).toFixed(digits).split(".");
  return (value < 0 ? "-" : "") + grouped(whole) + (part ? `.${part}` : "");
};
const SHOWN = {
  us: (v) => (v >= 1000 ? fixed(v, 0) : v >= 10 ? fixed(v, 1) : fixed(v, 2)),
  share: (v) => `${(100 * v).toFixed(1)} %`,
  error: (v) => v.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2"),
  times: (v) => fixed(v, 2),
  ms: (v) => fixed(v, 2),
  count: (v) => fixed(v, 0),
  gigabytes: (v) => (v / 1e9).toFixed(2),
  number: (v) => v.toFixed(2).replace(/\.?0+$/, ""),
};
function shown(kind, value) {
  if (value == null || value === "") return NONE;
  return typeof value === "string" ? value : (SHOWN[kind] || SHOWN.number)(value);
}
// A power of two for an axis: 512, 4K, 1M.
const short = (count) =>
  count >= 2 ** 20 ? `${count / 2 ** 20}M` : count >= 1024 ? `${count / 1024}K` : `${count}`;

// ---- switches: radio buttons, check boxes, and a list where there are many

function choice(label, options, chosen, change, asList = false) {
  if (asList) {
    const list = el("select", { "aria-label": label, onchange: (e) => change(e.target.value) });
    for (const [value, text] of options) {
      list.append(el("option", { value, selected: value === chosen }, text));
    }
    return el("fieldset", {}, el("legend", { "aria-hidden": "true" }, label), list);
  }
  const name = `choice-${(choice.count = (choice.count || 0) + 1)}`;
  const made = options.map(([value, text]) =>
    el("label", {},
      el("input", { type: "radio", name, value, checked: value === chosen,
        onchange: () => change(value) }),
      el("span", {}, text)));
  return el("fieldset", {}, el("legend", {}, label), el("div", { class: "options" }, ...made));
}

function toggles(label, options, change) {
  const made = options.map(({ value, text, on, swatch }) =>
    el("label", {},
      el("input", { type: "checkbox", value, checked: on,
        onchange: (e) => change(value, e.target.checked) }),
      el("span", {}, swatch, text)));
  return el("fieldset", {}, el("legend", {}, label), el("div", { class: "options" }, ...made));
}

// A line with its mark, as in the plot; coloured by the theme's variable of that name.
const MARKS = {
  circle: '<circle cx="12" cy="6" r="4"/>',
  square: '<rect x="8.5" y="2.5" width="7" height="7"/>',
  "triangle-up": '<path d="M12 1.5 16.5 9.5H7.5Z"/>',
  diamond: '<path d="M12 1.2 16.6 6 12 10.8 7.4 6Z"/>',
  "triangle-down": '<path d="M12 10.5 7.5 2.5H16.5Z"/>',
  cross: '<path d="M10.5 2h3v2.5H16v3h-2.5V10h-3V7.5H8v-3h2.5Z"/>',
};
function swatch(name, mark) {
  const made = el("span");
  made.innerHTML = `<svg viewBox="0 0 24 12" aria-hidden="true" style="color: var(--${name})">`
    + `<path d="M1 6H23" stroke="currentColor" stroke-width="2"/><g fill="currentColor">`
    + `${MARKS[mark]}</g></svg>`;
  return made.firstChild;
}

// What the colours of a plot stand for; with the mark, where each has its own.
function key(entries) {
  return el("ul", { class: "key" }, ...entries.map(([name, text, symbol]) =>
    el("li", {}, symbol ? swatch(name, symbol) : el("i", { style: `background: var(--${name})` }), text)));
}

// ---- tables and what can be downloaded

function table(sheet) {
  const side = (kind) => (WORDS.includes(kind) ? kind : "right");
  const head = sheet.columns.map(([name, kind]) =>
    el("th", { scope: "col", class: WORDS.includes(kind) ? null : "right" }, name));
  const body = sheet.rows.map((row) =>
    el("tr", {}, ...row.map((value, i) => {
      const kind = sheet.columns[i][1];
      return el("td", { class: side(kind) }, shown(kind, value));
    })));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": sheet.title },
    el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body)));
}

const FORMULA = /^([=+@\t\r]|-(?![\d.]))/; // what a spreadsheet would run: then it gets an apostrophe
function csv(sheet) {
  const quoted = (value) => {
    const isFormula = typeof value === "string" && FORMULA.test(value);
    const text = value == null ? "" : `${isFormula ? "'" : ""}${value}`;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [sheet.columns.map(([name]) => name), ...sheet.rows];
  return lines.map((line) => line.map(quoted).join(",")).join("\r\n") + "\r\n";
}

function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// The table of a sheet, made when it is opened; with its CSV, and more buttons.
// Fixed words, which switch with the language; a title that comes with the data stays as it is.
const titled = (text) => (own(CHINESE, text) ? worded(el("span"), text) : text);
const counted = (count, what) => `${shown("count", count)} ${what}${count === 1 ? "" : "s"}`;

function tableBox(id, sheet, { open = false, title = "Table", buttons = [] } = {}) {
  const box = el("details", { open });
  const count = el("small");
  const fill = () => {
    const now = sheet();
    count.textContent = ` ${shown("count", now.rows.length)} ${now.rows.length === 1 ? "row" : "rows"}`;
    if (!box.open) return;
    const note = now.note ? [el("p", { class: "note" }, now.note)] : [];
    box.replaceChildren(box.firstChild, table(now), ...note);
  };
  box.append(el("summary", {}, titled(title), count));
  box.addEventListener("toggle", fill);
  fill();
  const save = el("button", { type: "button", "aria-label": `${title}: download as CSV`,
    onclick: () => download(`online-softmax-${id}.csv`, `\ufeff${csv(sheet())}`, "text/csv") }, "CSV");
  const node = el("div", { class: "more" }, box, el("div", { class: "buttons" }, save, ...buttons));
  return { node, refresh: fill };
}

// ---- a figure: switches, the plot, a sentence, its table

// plot() gives {traces, layout, alt, caption, labels}; sheet() what stands behind it. Of labels says report-labels.js.
function figure({ id, title, controls = [], legend, plot, sheet, after = [] }) {
  const canvas = el("div", { class: "canvas", id: `plot-${id}`, role: "img" });
  const caption = el("figcaption");
  const picture = el("button", { type: "button", "aria-label": `${title}: download as PNG`,
    onclick: () => savePicture(canvas, id) }, "PNG");
  const box = tableBox(id, sheet, { buttons: [picture] });
  const node = el("figure", { "aria-label": title }, el("h3", {}, titled(title)),
    controls.length ? el("div", { class: "controls" }, ...controls) : null,
    legend || null, canvas, caption, ...after, box.node);
  let names, lay;
  const draw = () => {
    const { traces, layout, alt, caption: said = "", labels } = plot();
    canvas.setAttribute("aria-label", `${alt} The table below has every figure.`);
    caption.textContent = said;
    names = labels;
    canvas.style.height = `${layout.height}px`; // or Plotly takes what is left of it when the window changes
    Plotly.react(canvas, traces, styled(layout), CONFIG);
    if (labels) lay = lay || labelled(canvas, () => names);
    lay?.();
    box.refresh();
  };
  redraws.push(draw);
  return { node, draw };
}

const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset", showTips: false };

// What all plots have in common, in the colours of the theme.
function styled(layout) {
  const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false,
    tickcolor: colour("line"), automargin: true, fixedrange: isNarrow() };
  const sans = getComputedStyle(document.body).fontFamily;
  const made = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { family: sans, size: isNarrow() ? 11 : 12.5, color: colour("soft") },
    margin: { l: 8, r: 12, t: 22, b: 8 }, dragmode: isNarrow() ? false : "zoom", bargap: 0.28,
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("soft"), align: "left",
      font: { family: sans, size: 12.5, color: colour("ink") } },
    ...layout,
  };
  for (const name of ["xaxis", "yaxis"]) {
    made[name] = { ...axis, ...layout[name] };
    if (made[name].title) made[name].title = { font: { size: made.font.size }, standoff: 8, ...made[name].title };
  }
  return made;
}

// Marks at 1, 2 and 5 of each power of ten between two values, for an axis of logarithms.
function decades(low, high) {
  const raised = (power) => String(power).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] || "⁻");
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const lead of [1, 2, 5]) {
      const value = lead * 10 ** power;
      if (value >= low && value <= high) found.push([value, `${lead} · 10${raised(power)}`]);
    }
  }
  const kept = isNarrow() && found.length > 4 ? found.filter(([, text]) => text[0] === "1") : found;
  return { tickvals: kept.map(([value]) => value), ticktext: kept.map(([, text]) => text) };
}

function savePicture(canvas, id) {
  const layout = { ...canvas.layout, paper_bgcolor: colour("paper") };
  Plotly.downloadImage({ data: canvas.data, layout, config: CONFIG }, { format: "png", scale: 2,
    width: canvas.clientWidth, height: canvas.clientHeight, filename: `online-softmax-${id}` });
}
