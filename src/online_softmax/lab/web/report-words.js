// The page's fixed words in Chinese, by their English; what is drawn of the data stays English.
"use strict";

const CHINESE = {
  "Skip to the figures": "跳到图表",
  Auto: "自动", Light: "浅色", Dark: "深色",
  Machine: "机器",
  "The ladder": "阶梯",
  "The same softmax written again and again, each rung with one idea more. A bar is a share of the speed of a copy: one read, one write and nothing else, measured in the same run.":
    "同一个 softmax，一遍又一遍地写，每一级多一个想法。条的长度是拷贝速度的几成：拷贝只读一次、写一次，别的什么也不做，在同一次运行里测得。",
  Roofline: "屋顶线",
  "Two things can hold a softmax back: the bytes that must cross memory, and the units that evaluate exponentials. How far a rung lies below the slanted line is what it loses to a copy; the level line is what the exponentials alone would allow.":
    "拖住 softmax 的只有两样：必须过显存的字节，和计算指数的单元。一级台阶在斜线下面多远，就比拷贝差多少；水平线是单看指数能达到的速度。",
  "Speed by columns": "按列数看速度",
  "What ships, beside the kernel that only moves the same bytes and beside others. Large cells: so many rows that the matrix is far past the L2.":
    "随库发布的，旁边是只搬同样字节的 kernel，以及别家。大格：行数多到矩阵远远超出 L2。",
  "Few rows": "行少的时候",
  "How many times as fast as a rival on few rows, where launching and filling the card decide. Blue: faster. Orange: slower.":
    "行少时是对手的几倍快，那里看的是启动和能不能占满整张卡。蓝色：更快。橙色：更慢。",
  Accuracy: "精度",
  "The largest distance to float64, as a share of the row's size. Further left is closer.":
    "与 float64 的最大距离，除以这一行的大小。越靠左越准。",
  Memory: "显存",
  "The most that was allocated at once, where the plain computation holds every logit of a linear layer, or every score of attention.":
    "同时申请的最大量；直接去算，线性层的每个 logit、注意力的每个分数都得存下。",
  Attention: "注意力",
  "Ours beside PyTorch's own and others. Forward and backward are held back by products, decode and merges of parts by memory.":
    "本库旁边是 PyTorch 自己的和别家的。前向和反向受限于矩阵乘，解码和各段的合并受限于显存。",
  Losses: "损失",
  "Cross-entropy of logits and targets, alone and with its gradient; statistics of tokens.":
    "logits 与目标的交叉熵，单独的，以及连同梯度；token 的统计。",
  "Host and fusion": "主机端与融合",
  "Microseconds that the host spends on an eager call, before any kernel runs.":
    "一次 eager 调用里，任何 kernel 运行之前，主机端花的微秒。",
  "Where it stands": "总的来看",
  "Means, cells below their goal, cells where a rival is faster. Nothing is rounded before it is compared.":
    "平均值，没有达到目标的格，对手更快的格。比较之前什么都不舍入。",
  "Refusals and marks": "没有算的，和有标记的",
  "What gave no time, with its reason; and figures with something to know about them.":
    "没有得出时间的，附原因；以及需要留意的数字。",
  "How to read this": "怎么读这一页",
  "The limit of an operation is a kernel that moves the same bytes and computes nothing, timed in the same rounds: a copy, an addition, a read; of attention's forward and backward, one matrix product of as many operations.":
    "一个操作的极限，是搬同样的字节而什么都不算的 kernel，在同样的轮次里计时：一次拷贝、一次加法、一次读；注意力的前向和反向，则是运算次数相同的一次矩阵乘。",
  "All of it was timed on a CPU, and no figure says anything of a GPU. A time is the least of all calls, not a median: p20 and p80 lie above it.":
    "全部是在 CPU 上计时的，没有哪个数字说的是 GPU。时间是所有调用里最短的一次，不是中位数：p20 和 p80 都比它大。",
  "Times are medians; p20 and p80 stand beside them in the tables.":
    "时间是中位数，表里旁边有 p20 和 p80。",
  "Every contender was compared with float64 first: what is wrong has no time.":
    "每一方都先与 float64 比过：算错的没有时间。",
  "A cell a little above 100 % is marked with the reason. One above what the memory delivers is marked impossible, and is no result.":
    "略高于 100 % 的格标着原因。高于显存能力的，标作 impossible，不算结果。",
  "Throttled: the GPU's own counters say that its clock was held down while the cell was timed.":
    "Throttled：GPU 自己的计数器说，给这一格计时的时候频率被压低了。",
  "Drag over a figure to look closer, double-click to go back. CSV has the figures that a plot shows, times to seven digits.":
    "在图上拖动可以放大，双击复原。CSV 里是图上的数字，时间有七位。",
  "All cells as CSV": "全部格子，CSV",
  "How each part was measured": "各部分是怎么测的",
  "Marked cells": "有标记的格",
  "Without a time, or timed by do_bench alone": "没有时间的，或者只用 do_bench 计时的",
  "Every rung beside a copy": "每一级，旁边是拷贝",
  "Exponentials a second, and a byte": "每秒的指数，每字节的指数",
  "Times as fast on few rows": "行少时快几倍",
  "Largest error, ours and torch's": "最大误差，本库的和 torch 的",
  "Losses by columns": "损失，按列数",
  "Ours and the rivals by columns": "本库和别家，按列数",
  Table: "表",
  "Table of runs": "各次运行的表",
  "Marked cells, with the reason": "有标记的格，附原因",
  "What is marked impossible is not drawn.": "标作 impossible 的不画。",
  "None: everything that was asked ran, and no figure is marked.": "没有：要求的都跑了，也没有数字带标记。",
  "How far each kernel, and each rival, is from what the machine allows; where it falls short; and the table behind every figure.":
    "每个 kernel、每一家，离这台机器所能做到的还差多少；差在哪里；每张图背后的表也都在。",
  "Made by online-softmax report from": "online-softmax report 的产物，来自",
  "The documentation stands in the repository of online-softmax: README.md, README.zh.md, and docs/ in both languages.":
    "文档在 online-softmax 的仓库里：README.md、README.zh.md，以及 docs/，中英文都有。",
};
const LANGUAGES = [["en", "English"], ["zh", "中文"]];

const preferred = () => (navigator.language.startsWith("zh") ? "zh" : "en");
let spoken = remembered("language") || preferred();

// An element's words, in the language of the page from now on.
function worded(node, text) {
  const chinese = spoken === "zh" ? own(CHINESE, text) : undefined;
  node.dataset.said = text;
  node.textContent = chinese ?? text;
  if (chinese) node.lang = "zh-CN";
  else node.removeAttribute("lang");
  return node;
}

// The words of the template, at the start; and a switch.
function languages(place) {
  const fixed = ".skip, main > section > h2, main > section > .about, #documentation";
  for (const node of document.querySelectorAll(fixed)) worded(node, node.textContent.trim());
  const made = choice("Language", LANGUAGES, spoken, (value) => {
    spoken = value;
    remember("language", value);
    for (const node of document.querySelectorAll("[data-said]")) worded(node, node.dataset.said);
  });
  made.querySelector("legend").className = "unseen";
  place.append(made);
}
