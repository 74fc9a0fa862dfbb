// Names beside the points of a plot, none over another, over a point or out of the plot.
"use strict";

const LABEL_SIDES = [[1, 0], [-1, 0], [0, -1], [0, 1], [1, -1], [1, 1], [-1, -1], [-1, 1]]; // right first
const LABEL_GAPS = [3, 9, 18, 30, 44]; // pixels from a point's edge to its name; past the first with a line
const POINT_RADIUS = 7;
const ON_LABEL = 1000, ON_LINE = 12, LATER = 1; // what a place costs; one that covers something is none

// Boxes are [left, top, right, bottom] in pixels of the plot's area.
const covers = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
const around = (x, y, wide, high) => [x - wide / 2, y - high / 2, x + wide / 2, y + high / 2];

// Whether a line from one point to another goes through a box.
function crosses([x1, y1, x2, y2], box) {
  let from = 0, to = 1;
  for (const [start, step, low, high] of [[x1, x2 - x1, box[0], box[2]], [y1, y2 - y1, box[1], box[3]]]) {
    if (step === 0) {
      if (start < low || start > high) return false;
      continue;
    }
    const ends = [(low - start) / step, (high - start) / step].sort((a, b) => a - b);
    from = Math.max(from, ends[0]);
    to = Math.min(to, ends[1]);
  }
  return from <= to;
}

// Where each name goes: [dx, dy] from its point to its middle, or null where there is no room.
// points: [{x, y, text}], in pixels; taken: boxes to keep free; lines: [x1, y1, x2, y2], better not crossed.
function placeLabels(points, { width, height, size, taken = [], lines = [] }) {
  const measure = document.createElement("canvas").getContext("2d");
  measure.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  const dots = points.map(({ x, y }) => around(x, y, 2 * POINT_RADIUS, 2 * POINT_RADIUS));
  const kept = [...taken];
  return points.map(({ x, y, text }, own) => {
    if (!text) return null;
    const wide = measure.measureText(text).width + 4, high = size + 3;
    let best = null, least = ON_LABEL;
    LABEL_GAPS.forEach((gap, far) => LABEL_SIDES.forEach(([right, down], turn) => {
      const reach = POINT_RADIUS + gap;
      const dx = right * (reach + wide / 2) * (right && down ? 0.8 : 1), dy = down * (reach + high / 2);
      const box = around(x + dx, y + dy, wide, high);
      const isOut = box[0] < 0 || box[1] < 0 || box[2] > width || box[3] > height;
      const isOn = kept.some((each) => covers(box, each)) || dots.some((each, i) => i !== own && covers(box, each));
      if (isOut || isOn) return;
      const cost = lines.filter((each) => crosses(each, box)).length * ON_LINE + far * LATER * LABEL_SIDES.length + turn * LATER;
      if (cost < least) [best, least] = [[dx, dy, gap, box], cost];
    }));
    if (!best) return null;
    kept.push(best[3]);
    return { dx: best[0], dy: best[1], isFar: best[2] > LABEL_GAPS[0] };
  });
}

// After each drawing, and each change of its size or ranges, lay names beside a plot's points.
// given() is {points: [{x, y, text}] in values of logarithmic axes, lines, notes: annotations that stay, size: of text};
// what comes back lays them again, after a drawing that began anew.
function labelled(canvas, given) {
  let before = "";
  const lay = (isNew) => {
    const { xaxis, yaxis } = canvas._fullLayout;
    const { points, lines, notes, size } = given();
    const now = JSON.stringify([xaxis._length, yaxis._length, xaxis.range, yaxis.range]);
    if (!isNew && now === before) return;
    before = now;
    const to = (x, y) => [xaxis.l2p(Math.log10(x)), yaxis.l2p(Math.log10(y))];
    const dots = points.map((point) => {
      const [x, y] = to(point.x, point.y);
      return { x, y, text: point.text };
    });
    const ends = lines.map(([x1, y1, x2, y2]) => [...to(x1, y1), ...to(x2, y2)]);
    const said = [...canvas.querySelectorAll(".annotation-text-g")].slice(0, notes.length);
    const frame = canvas.querySelector(".nsewdrag").getBoundingClientRect();
    const taken = said.map((node) => node.getBoundingClientRect())
      .map((box) => [box.left - frame.left, box.top - frame.top, box.right - frame.left, box.bottom - frame.top]);
    const found = placeLabels(dots, { width: xaxis._length, height: yaxis._length, size, taken, lines: ends });
    const names = points.flatMap((point, i) => (found[i] ? [{ x: Math.log10(point.x), y: Math.log10(point.y), text: plain(point.text),
      ax: found[i].dx, ay: found[i].dy, xanchor: "center", yanchor: "middle", showarrow: true, arrowhead: 0, arrowwidth: 1, standoff: POINT_RADIUS,
      arrowcolor: found[i].isFar ? colour("soft") : "rgba(0,0,0,0)", borderpad: 0, font: { size, color: colour("soft") } }] : []));
    Plotly.relayout(canvas, { annotations: [...notes, ...names] });
  };
  canvas.on("plotly_afterplot", () => lay(false));
  return () => lay(true);
}
