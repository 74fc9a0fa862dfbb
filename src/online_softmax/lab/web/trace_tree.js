// The tree of states: leaves above, merged downwards. One stop for Tab; arrow keys inside.

const [NODE_WIDTH, LEVEL_HEIGHT, NODE_HEIGHT] = [96, 104, 50]; // CSS pixels

function treeView(host, detail) {
  let [boxes, nodes] = [new Map(), []];

  function draw(made, walk) {
    nodes = made.nodes;
    boxes = new Map();
    const middle = (node) => (node.parts.length
      ? (middle(node.parts[0]) + middle(node.parts[1])) / 2 : (node.first + 0.5) / made.leaves);
    const centre = (node) => ({ x: 100 * middle(node), y: node.round * LEVEL_HEIGHT });
    const lines = [];
    const labels = [];
    for (const node of nodes) {
      node.parts.forEach((part, i) => {
        const [from, to] = [centre(part), centre(node)];
        lines.push(make("line", {
          x1: `${from.x}%`, y1: from.y + NODE_HEIGHT, x2: `${to.x}%`, y2: to.y, class: i ? "right" : "left" }));
        const label = make("span", { class: i ? "edge right" : "edge left" }, `× ${show(node.weights[i], 3)}`);
        // Where a long line ends, so that no label lies on another.
        label.style.left = `${to.x + (from.x - to.x) * (node.round - part.round > 1 ? 0.2 : 0.5)}%`;
        label.style.top = `${to.y - (LEVEL_HEIGHT - NODE_HEIGHT) / 2}px`;
        labels.push(label);
      });
      boxes.set(node, box(node, centre(node)));
    }
    const height = `${made.root.round * LEVEL_HEIGHT + NODE_HEIGHT + 8}px`;
    const body = make("div", { class: "tree-body", role: "group", "aria-label": word("tree_label") },
      make("svg", { "aria-hidden": "true" }, lines), labels, [...boxes.values()]);
    body.style.height = height;
    body.style.minWidth = `${made.leaves * NODE_WIDTH}px`;
    host.replaceChildren(body);
    host.scrollLeft = (middle(made.root) * host.scrollWidth) - host.clientWidth / 2;
    tell(made.root);
    find("tree-root").textContent = Number.isFinite(made.root.m)
      ? word("tree_root", show(made.root.m), show(made.root.d), show(walk.steps.at(-1).d))
      : word("means_nothing", show(made.root.m));
  }

  function box(node, { x, y }) {
    const d = Number.isFinite(node.m) ? few(node.d) : "–";
    const name = word("tree_blocks", node.first + 1, node.last + 1);
    const made = make("button", {
      type: "button", class: node.parts.length ? "node" : "node leaf", tabindex: "-1",
      "aria-label": word("tree_node", name, show(node.m), d),
      onfocus: () => tell(node), onmouseenter: () => tell(node), onclick: () => tell(node),
      onkeydown: (event) => key(event, node),
    }, make("span", {}, make("var", {}, "m"), ` ${few(node.m)}`),
    make("span", {}, make("var", {}, "d"), ` ${d}`));
    made.style.left = `${x}%`;
    made.style.top = `${y}px`;
    return made;
  }

  function focusable(chosen) {
    for (const [node, each] of boxes) each.tabIndex = node === chosen ? 0 : -1;
  }

  function key(event, node) {
    const beside = nodes.filter((each) => each.round === node.round);
    const at = beside.indexOf(node);
    const next = {
      ArrowLeft: beside[at - 1], ArrowRight: beside[at + 1], ArrowUp: node.parts[0],
      ArrowDown: nodes.find((each) => each.parts.includes(node)),
    };
    if (!(event.key in next)) return;
    event.preventDefault();
    event.stopPropagation();
    const to = next[event.key];
    if (to) boxes.get(to).focus();
  }

  function tell(node) {
    focusable(node);
    for (const [each, made] of boxes) made.classList.toggle("told", each === node);
    for (const [each, made] of boxes) made.classList.toggle("part", node.parts.includes(each));
    if (!node.parts.length) {
      const said = word("tree_leaf", node.first + 1, list(node.values));
      const parts = [term(node.m, "m", "whole"), sign(","), term(node.d, "d", "whole")];
      const pair = make("div", { class: "line" }, sign("("), parts, sign(")"));
      detail.replaceChildren(make("p", {}, said), Number.isFinite(node.m) ? pair
        : make("p", { class: "quiet" }, word("means_nothing", show(node.m))));
      return;
    }
    const [a, b] = node.parts;
    const name = (part) => word("tree_blocks", part.first + 1, part.last + 1);
    const names = {
      m: [word("left_m"), word("right_m")], d: [word("left_d"), word("right_d")] };
    const lines = merged(a, b, node.weights, node, names);
    detail.replaceChildren(make("p", {}, word("tree_merge", name(a), name(b))),
      ...(Number.isFinite(node.m) ? lines
        : [lines[0], make("p", { class: "quiet" }, word("means_nothing", show(node.m)))]));
  }

  // The leaf that the walk has just read.
  draw.mark = (leaf) => {
    for (const [node, made] of boxes) {
      const isLeaf = !node.parts.length;
      made.classList.toggle("fresh", isLeaf && node.first === leaf);
      made.classList.toggle("unread", isLeaf && node.first > leaf);
    }
  };
  return draw;
}
