// The page: its texts, tabs, link and steps; what `window.onlineSoftmax` gives.

// What the command that wrote the page was given; a link's own words come before it.
const GIVEN = JSON.parse(find("given").textContent);
const LIMITS = GIVEN.limits;
const DEFAULT_SIZES = { queries: 2, keys: 6, dim: 4, value_dim: 2, block: 2 };
const FIELDS = { numbers: "x", block: "block", q: "q", k: "k", v: "v", tile: "tile" };
const PLAY_MS = 1400;
const LINK_MS = 120; // browsers refuse an address that changes with every move of a slider

const page = { lang: "en", tab: "row", type: "float32", steps: { row: 1, attention: 1 } };
let tabs = {};
let player = null; // the timer, while it plays
let linking = null; // the timer of an address to be written
let linked = ""; // the address as it was last read or written

function word(key, ...parts) {
  const text = WORDS[page.lang][key];
  return typeof text === "function" ? text(...parts) : text;
}

// ---- the link

const asText = (rows) => rows.map((row) => row.map(shortest).join(" ")).join("\n");

function fromRule(sizes) {
  const { q, k, v } = rule(sizes);
  return { q: asText(q), k: asText(k), v: asText(v) };
}

function restore() {
  linked = location.hash;
  const sizes = { ...DEFAULT_SIZES, ...GIVEN.sizes };
  const link = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const spoken = navigator.language.startsWith("zh") ? "zh" : "en";
  const start = {
    x: GIVEN.x, block: GIVEN.block, ...fromRule(sizes), tile: sizes.block,
    causal: GIVEN.sizes?.is_causal ? "1" : "", tab: GIVEN.sizes ? "attention" : "row",
    type: "float32", step: "1", query: "0", mask: "", ...link };
  page.isChosen = Object.hasOwn(WORDS, link.lang);
  page.lang = page.isChosen ? link.lang : spoken;
  page.tab = start.tab === "attention" ? "attention" : "row";
  page.type = Object.hasOwn(ROUND, start.type) ? start.type : "float32";
  // A field of one line would drop the end of a line, and join two numbers.
  const spread = (text, id) => String(text).replace(/;/g, find(id).matches("textarea") ? "\n" : ";").replace(/,/g, " ");
  for (const [id, key] of Object.entries(FIELDS)) find(id).value = spread(start[key], id);
  find("causal").checked = start.causal === "1";
  for (const name of Object.keys(DEFAULT_SIZES)) {
    if (find(`fill-${name}`)) find(`fill-${name}`).value = sizes[name];
  }
  page.steps = { row: 1, attention: 1, [page.tab]: Math.max(0, Math.trunc(Number(start.step)) || 0) };
  page.kept = { query: start.query, mask: start.mask };
}

function keep() {
  clearTimeout(linking);
  linking = setTimeout(writeLink, LINK_MS);
}

function writeLink() {
  clearTimeout(linking);
  if (location.hash !== linked) return; // another was given just now: its event is on the way
  const values = Object.fromEntries(Object.entries(FIELDS).map(([id, key]) =>
    [key, find(id).value.trim().replace(/\s*\n\s*/g, ";").replace(/[\s,，]+/g, ",")]));
  const { x, block, q, k, v, tile } = values;
  const own = page.tab === "row" ? { x, block }
    : { tab: "attention", q, k, v, tile, causal: find("causal").checked ? "1" : "", ...tabs.attention.kept() };
  const link = new URLSearchParams();
  const all = { ...own, step: page.steps[page.tab], type: page.type === "float32" ? "" : page.type };
  for (const [key, value] of Object.entries(all)) if (value !== "") link.set(key, value);
  if (page.isChosen) link.set("lang", page.lang);
  history.replaceState(null, "", `#${String(link).replace(/%2C/g, ",").replace(/%3B/g, ";")}`);
  linked = location.hash;
}

// ---- steps

function move(n) {
  const tab = tabs[page.tab];
  const step = Math.min(Math.max(n, 0), tab.count());
  page.steps[page.tab] = step;
  const said = tab.move(step);
  const [slider, place] = [find("slider"), word("of", step, tab.count())];
  slider.max = tab.count();
  slider.value = step;
  slider.setAttribute("aria-valuetext", place);
  find("place").textContent = place;
  // Not `disabled`: that would take the focus, and with it the keys, from whoever steps.
  const stops = { start: step === 0, back: step === 0, next: step === tab.count() };
  for (const [id, isEnd] of Object.entries(stops)) find(id).setAttribute("aria-disabled", isEnd);
  if (find("live").textContent !== said) find("live").textContent = said;
  keep();
}

const step = (by) => move(page.steps[page.tab] + by);

function play(isOn) {
  clearInterval(player);
  player = isOn ? setInterval(() => {
    step(1);
    if (page.steps[page.tab] === tabs[page.tab].count()) play(false);
  }, PLAY_MS) : null;
  find("play").textContent = word(isOn ? "pause" : "play");
}

function toggle() {
  if (player) return play(false);
  if (page.steps[page.tab] === tabs[page.tab].count()) move(0);
  return play(true);
}

function keys(event) {
  const { target } = event;
  const isTaken = target.closest?.("input, textarea, [role=tab]") || target.matches?.(".scroll");
  if (isTaken || event.ctrlKey || event.metaKey || event.altKey) return;
  const does = {
    ArrowLeft: () => step(-1), ArrowRight: () => step(1), Home: () => move(0),
    End: () => move(tabs[page.tab].count()), p: toggle, P: toggle }[event.key];
  if (!does) return;
  event.preventDefault();
  if (!/p/i.test(event.key)) play(false);
  does();
}

// ---- the whole page

// Read the fields of the tab again; a wrong one leaves what is shown.
function edited() {
  play(false);
  if (tabs[page.tab].take(page.type)) move(page.steps[page.tab]);
  else keep();
}

// The first sight of a tab: if a link's field is wrong, its error stands over the default.
function open(name) {
  page.tab = name;
  for (const each of ["row", "attention"]) {
    const isOpen = each === name;
    find(`${each}-panel`).hidden = !isOpen;
    find(`${each}-tab`).setAttribute("aria-selected", String(isOpen));
    find(`${each}-tab`).tabIndex = isOpen ? 0 : -1;
  }
  play(false);
  const ids = name === "row" ? ["numbers", "block"] : ["q", "k", "v", "tile"];
  if (!tabs[name].take(page.type)) {
    const typed = ids.map((id) => find(id).value);
    const start = { numbers: EXAMPLES[0][1], block: 3, ...fromRule(DEFAULT_SIZES), tile: 2 };
    if (!tabs[name].isShown) {
      ids.forEach((id) => { find(id).value = start[id]; });
      tabs[name].take(page.type);
      ids.forEach((id, i) => { find(id).value = typed[i]; });
      tabs[name].take(page.type); // says again what is wrong
    }
  }
  tabs[name].isShown = true;
  move(page.steps[name]);
}

// Texts, then both tabs made anew, at a start and in another language.
function speak() {
  document.documentElement.lang = page.lang === "zh" ? "zh-CN" : "en";
  document.title = word("title");
  for (const each of document.querySelectorAll("[data-word]")) {
    each.textContent = word(each.dataset.word);
  }
  for (const each of document.querySelectorAll("[data-label]")) {
    each.setAttribute("aria-label", word(each.dataset.label));
  }
  for (const each of document.querySelectorAll("[data-lang]")) {
    each.setAttribute("aria-pressed", String(each.dataset.lang === page.lang));
  }
  for (const each of document.querySelectorAll("[data-type]")) {
    each.setAttribute("aria-pressed", String(each.dataset.type === page.type));
  }
  theme();
  find("examples").replaceChildren(...EXAMPLES.map(([name, x, block]) => make("button", {
    type: "button", onclick: () => {
      find("numbers").value = x;
      find("block").value = block;
      page.steps.row = 1;
      edited();
    } }, word(`example_${name}`))));
  const kept = tabs.attention ? tabs.attention.kept() : page.kept;
  const changed = (n) => { play(false); move(n ?? page.steps[page.tab]); };
  tabs = { row: rowTab(changed), attention: attentionTab(changed, edited) };
  tabs.attention.restore(kept);
  open(page.tab);
}

function theme() {
  const isDark = document.documentElement.dataset.theme === "dark";
  find("theme").textContent = word(isDark ? "theme_light" : "theme_dark");
}

function fill() {
  const names = ["queries", "keys", "dim", "value_dim"];
  const sizes = names.map((name) => read(`fill-${name}`, (text) => {
    const count = whole(text);
    atMost([name, LIMITS[name]], count);
    return count;
  }));
  if (sizes.includes(null)) return;
  const values = fromRule(Object.fromEntries(names.map((name, i) => [name, sizes[i]])));
  for (const id of ["q", "k", "v"]) find(id).value = values[id];
  page.steps.attention = 1;
  edited();
}

async function copy() {
  let said = "copied";
  writeLink();
  try {
    await navigator.clipboard.writeText(location.href);
  } catch {
    said = "not_copied";
  }
  find("copied").textContent = word(said);
}

function listen() {
  const on = (id, event, does) => find(id).addEventListener(event, does);
  for (const id of [...Object.keys(FIELDS), "causal", "mask"]) on(id, "input", edited);
  on("start", "click", () => { play(false); move(0); });
  on("back", "click", () => { play(false); step(-1); });
  on("next", "click", () => { play(false); step(1); });
  on("play", "click", toggle);
  on("slider", "input", () => { play(false); move(Number(find("slider").value)); });
  on("copy", "click", copy);
  on("fill-do", "click", fill);
  on("theme", "click", () => {
    const root = document.documentElement;
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    theme();
  });
  for (const each of document.querySelectorAll("[data-lang]")) {
    each.addEventListener("click", () => {
      page.lang = each.dataset.lang;
      page.isChosen = true;
      speak();
    });
  }
  for (const each of document.querySelectorAll("[data-type]")) {
    each.addEventListener("click", () => {
      page.type = each.dataset.type;
      speak();
    });
  }
  for (const name of ["row", "attention"]) {
    const other = name === "row" ? "attention" : "row";
    on(`${name}-tab`, "click", () => open(name));
    on(`${name}-tab`, "keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.preventDefault();
      open(other);
      find(`${other}-tab`).focus();
    });
  }
  document.addEventListener("keydown", keys);
  addEventListener("hashchange", () => {
    clearTimeout(linking);
    tabs = {};
    restore();
    speak();
  });
  addEventListener("pagehide", writeLink);
}

window.onlineSoftmax = { trace, tree, rule, attention, general, number, numbers, words: WORDS, naive };
restore();
listen();
speak();
