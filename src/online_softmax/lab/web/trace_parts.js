// What both tabs are made of: elements, numbers read and shown, equations, bars, tables.

// An element: attributes, `on...` listeners, then children, strings among them. Never markup.
function make(name, attributes = {}, ...children) {
  const space = name === "svg" || name === "line" ? "http://www.w3.org/2000/svg" : null;
  const element = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.flat());
  return element;
}

const find = (id) => document.getElementById(id);

// ---- numbers, shown

// "1.25e-7" of digits + 1 digits, rounded half to even as Python does; toExponential rounds up.
function rounded(x, digits) {
  const [all, power] = x.toExponential(60).split("e");
  const tie = new RegExp(`^(-?\\d\\.\\d{${digits - 1}})50*$`).exec(all);
  const isEven = tie && /[02468]$/.test(tie[1]);
  return isEven ? [tie[1], power] : x.toExponential(digits - 1).split("e");
}

// As Python's f"{x:.7g}".
function general(x, digits = 7) {
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "-inf";
  if (x === 0) return Object.is(x, -0) ? "-0" : "0";
  const [mantissa, power] = rounded(x, digits);
  const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
  if (power < -4 || power >= digits) {
    return `${trimmed(mantissa)}e${power[0]}${power.slice(1).padStart(2, "0")}`;
  }
  const [sign, ...figures] = `${x < 0 ? "-" : " "}${mantissa.replace(/[-.]/g, "")}`;
  const text = `${"0".repeat(Math.max(0, -power))}${figures.join("")}`;
  const point = Math.max(0, power) + 1;
  return sign.trim() + trimmed(point < text.length ? `${text.slice(0, point)}.${text.slice(point)}` : text);
}

// The same for the eye: a true minus, ∞, NaN.
const show = (x, digits = 7) =>
  general(x, digits).replace("inf", "∞").replace("nan", "NaN").replace(/-/g, "−");
const few = (x) => show(x, 4);
const list = (values, digits = 7) => values.map((x) => show(x, digits)).join("  ");

// ---- numbers, read

const PLAIN = /^[+-]?(\d+(_\d+)*\.?(\d+(_\d+)*)?|\.\d+(_\d+)*)(e[+-]?\d+(_\d+)*)?$/i;
const SPECIAL = /^([+-]?)(inf|infinity|nan)$/i;
const SHOWN = 60; // characters of what was typed that an error repeats

// What is wrong with a text, said beside its field.
class Wrong extends Error {}

// A number as Python's float() reads it; full-width digits and a true minus count too.
function number(text) {
  const given = text.normalize("NFKC").replace(/−/g, "-");
  const special = SPECIAL.exec(given);
  if (special) return special[2].toLowerCase() === "nan" ? NaN : `${special[1]}1` * Infinity;
  if (PLAIN.test(given)) return Number(given.replace(/_/g, ""));
  throw new Wrong(word("not_number", text.length > SHOWN ? `${text.slice(0, SHOWN)}...` : text));
}

// Several, between spaces or commas, as the command takes them.
function numbers(text) {
  const stripped = text.trim().replace(/^[[\]()]+|[[\]()]+$/g, "");
  return stripped.split(/[\s,，]+/).filter(Boolean).map(number);
}

function whole(text) {
  if (!/^\s*\+?\d+\s*$/.test(text) || Number(text) < 1) {
    throw new Wrong(word("whole", text.trim().slice(0, SHOWN)));
  }
  return Number(text);
}

// Lines of numbers, all of one length.
function matrix(text, mostLines, mostNumbers) {
  const lines = text.split(/[\n;]/).filter((line) => line.trim());
  const rows = lines.map(numbers).filter((row) => row.length);
  if (!rows.length) throw new Wrong(word("no_lines"));
  rows.forEach((row, i) => {
    if (row.length !== rows[0].length) {
      throw new Wrong(word("ragged", i + 1, row.length, rows[0].length));
    }
  });
  atMost(mostLines, rows.length);
  atMost(mostNumbers, rows[0].length);
  return rows;
}

function atMost([what, most], got) {
  if (got > most) throw new Wrong(word("too_many", word(what), most, got));
}

// Read a field; what is wrong stands beside it, and the result is null.
function read(id, parse) {
  const [field, error] = [find(id), find(`${id}-error`)];
  try {
    const found = parse(field.value);
    field.removeAttribute("aria-invalid");
    error.textContent = "";
    return found;
  } catch (wrong) {
    if (!(wrong instanceof Wrong)) throw wrong;
    field.setAttribute("aria-invalid", "true");
    error.textContent = wrong.message;
    return null;
  }
}

// ---- equations

// A number, or a column of them, over what it is called.
function term(value, name, kind = "") {
  const numberOf = (x) => make("span", { class: "num" }, few(x));
  const body = Array.isArray(value)
    ? make("span", { class: "vector" }, value.map(numberOf)) : numberOf(value);
  return make("span", { class: `term ${kind}` }, body, make("small", {}, name));
}

const sign = (text) => make("span", { class: "sign" }, text);

// "m = ...": a sign stays on the line of what follows it.
function line(name, ...parts) {
  const groups = [[make("var", {}, name)]];
  for (const each of ["=", ...parts]) {
    const last = groups.at(-1);
    if (typeof each !== "string") last.push(each);
    else if (each === "," || each === ")") last.push(sign(each));
    else if (each.endsWith("(")) last.push(sign(each));
    else groups.push([sign(each)]);
  }
  return make("div", { class: "line" },
    groups.map((group) => make("span", { class: "group-of" }, group)));
}

const difference = (from, to) => `exp(${few(from)} − ${to < 0 ? `(${few(to)})` : few(to)})`;

// m and d, and o where there is one, of two parts merged; names: what they are called.
function merged(a, b, weights, whole, names) {
  const [wA, wB] = [
    term(weights[0], difference(a.m, whole.m), "factor"),
    term(weights[1], difference(b.m, whole.m), "factor"),
  ];
  const max = ["max(", term(a.m, names.m[0], "old"), ",", term(b.m, names.m[1], "new"), ")"];
  const sum = (key) => [
    term(a[key], names[key][0], "old"), "×", wA.cloneNode(true), "+",
    term(b[key], names[key][1], "new"), "×", wB.cloneNode(true), "=", term(whole[key], key, "whole"),
  ];
  return [
    line("m", ...max, "=", term(whole.m, "m", "whole")),
    line("d", ...sum("d")),
    ...(whole.o.length ? [line("o", ...sum("o"))] : []),
  ];
}

// ---- bars

const UNDER = 0.2; // of the strip's height: about a tag and its dot
const clamp = (x) => (Number.isFinite(x) ? Math.min(Math.max(x, 0), 1) : 0);

// Three strips over the same columns: x with m, exp(x - m), exp(x - m) / d. Built once a row of
// numbers, then moved, so that a change is seen to happen.
function strips(host, titles) {
  let columns = [];
  let place = () => 0.5;
  let [rule, level, digits] = [null, null, 3];

  function build(values, block) {
    const finite = values.filter(Number.isFinite);
    const [low, high] = [Math.min(...finite), Math.max(...finite)];
    place = (x) => {
      if (!Number.isFinite(x)) return Number.isNaN(x) ? 0.5 : Number(x > 0);
      return low === high ? 0.5 : 0.1 + 0.8 * ((x / 2 - low / 2) / (high / 2 - low / 2));
    };
    const size = values.length <= 12 ? "wide" : values.length <= 24 ? "middle" : "narrow";
    digits = size === "wide" ? 3 : 2;
    level = make("span", { class: "value" });
    const strip = (kind, title, cells) => make("div", { class: `strip ${kind}` },
      make("p", { class: "caption" }, `${title} `, kind === "levels" ? level : ""),
      make("div", { class: "cells" }, cells));
    columns = values.map((x, i) => {
      const column = { parts: [] };
      const cell = (...children) => {
        const made = make("div", { class: "cell" }, children);
        if (i && i % block === 0) made.classList.add("first");
        column.parts.push(made);
        return made;
      };
      const tag = () => make("span", { class: "tag" });
      column.dot = make("i", { class: "dot" });
      column.tags = [tag(), tag(), tag()];
      column.bars = [make("i", { class: "bar" }), make("i", { class: "bar" })];
      column.cells = [
        cell(column.dot, column.tags[0]),
        cell(column.bars[0], column.tags[1]), cell(column.bars[1], column.tags[2]),
      ];
      column.dot.style.bottom = `${100 * place(x)}%`;
      column.tags[0].style.bottom = `${100 * place(x)}%`;
      column.tags[0].textContent = few(x);
      return column;
    });
    rule = make("div", { class: "rule" });
    const made = titles.map((title, n) =>
      strip(["levels", "weights", "probs"][n], title, columns.map((column) => column.cells[n])));
    made[0].querySelector(".cells").append(rule);
    const body = make("div", { class: `strips ${size}` }, made);
    body.style.setProperty("--n", values.length);
    const label = { class: "scroll", tabindex: "0", role: "img", "aria-label": word("strips_label") };
    host.replaceChildren(make("div", label, body));
  }

  // state: after so many numbers were read, the last `fresh` of them in this step.
  function move(state, values, done, fresh, r) {
    rule.hidden = Number.isNaN(state.m) || done === 0;
    rule.style.bottom = `${100 * place(state.m)}%`;
    rule.style.width = `${(100 * done) / values.length}%`;
    level.textContent = show(state.m);
    values.forEach((x, i) => {
      const { parts, bars, tags } = columns[i];
      const below = place(state.m) - place(x); // a tag that the line of m would cross hangs down
      tags[0].classList.toggle("under", i < done && below > 0 && below < UNDER);
      const isRead = i < done;
      const weights = isRead && Number.isFinite(state.m)
        ? [r.exp(r.round(x - state.m)), r.prob(x, state)] : [NaN, NaN];
      for (const part of parts) {
        part.classList.toggle("unread", !isRead);
        part.classList.toggle("fresh", isRead && i >= done - fresh);
      }
      weights.forEach((weight, n) => {
        bars[n].style.transform = `scaleY(${clamp(weight)})`;
        tags[n + 1].style.bottom = `calc((100% - 20px) * ${clamp(weight)})`; // 20px: room for a tag
        tags[n + 1].textContent = Number.isNaN(weight) ? "" : show(weight, digits);
      });
    });
    const fresher = columns[Math.max(done - fresh, 0)]?.cells[0];
    const scroll = host.firstChild;
    if (fresher && scroll.scrollWidth > scroll.clientWidth) {
      scroll.scrollTo({ left: fresher.offsetLeft - scroll.clientWidth / 3 });
    }
  }

  return { build, move };
}

// Signed bars around zero, one for each number.
function signed(host, title, count) {
  const bars = Array.from({ length: count }, () => make("i", { class: "bar" }));
  const tags = bars.map(() => make("span", { class: "tag" }));
  host.replaceChildren(make("p", { class: "caption" }, title),
    make("div", { class: "signed" }, bars.map((bar, i) =>
      make("div", { class: "beam" }, make("div", { class: "half" }, bar), tags[i]))));
  return (values, largest) => values.forEach((x, i) => {
    const part = Number.isFinite(x) && largest > 0 ? x / largest : 0;
    bars[i].style.transform = `scaleX(${part})`;
    bars[i].classList.toggle("below", part < 0);
    tags[i].textContent = few(x);
  });
}

// ---- tables

// A table of steps: its first column has buttons, and the one that was pressed keeps the focus.
function stepTable(host, headings, rows, n, left) {
  const marks = rows.map((_, i) => (i + 1 === n ? "now" : i < n ? "" : "later"));
  const isInside = host.contains(document.activeElement);
  table(host, headings, rows, { marks, left });
  const now = host.querySelector(".now");
  host.scrollTop = now ? now.offsetTop - host.clientHeight / 2 : 0;
  if (isInside && n) host.querySelectorAll(".go")[n - 1].focus({ preventScroll: true });
}

const goTo = (n, changed) => make("button", {
  type: "button", class: "go", "aria-label": word("go_to", n), onclick: () => changed(n) }, String(n));

// rows: lists of cells, a string or an element each; `marks[i]`: a class of that row.
function table(host, headings, rows, { marks = [], left = [] } = {}) {
  const side = (col) => (left.includes(col) ? "left" : null);
  host.replaceChildren(make("table", {},
    make("thead", {}, make("tr", {}, headings.map((text, col) =>
      make("th", { scope: "col", class: side(col) }, text)))),
    make("tbody", {}, rows.map((row, i) => make("tr", { class: marks[i] || null },
      row.map((cell, col) => make("td", { class: side(col) }, cell)))))));
}
