"""Drawn tables in Chinese, for the pages `*.zh.md`: `said` puts the words of an English table.

The tables are drawn once, in English; here every cell and every line beneath one is looked up.
What is code, a name or a number stays as it is, so both pages have the same figures. A word that
nobody has put here is an error, not English in a Chinese page.
"""

from __future__ import annotations

import re

WORDS = {
    # heads
    "rung": "台阶",
    "idea": "思路",
    "reads": "读",
    "exps": "指数",
    "registers": "寄存器",
    "of copy": "相对拷贝",
    "x torch": "相对 torch",
    "rows x cols": "行 x 列",
    "copy": "拷贝",
    "threads a block": "每块线程数",
    "predicted reads": "预测的读",
    "loads from L1": "从 L1 读",
    "reads from L2": "从 L2 读",
    "reads from DRAM": "从 DRAM 读",
    "writes to L2": "写到 L2",
    "pass": "方向",
    "keys": "键",
    "ours": "本库",
    "ours, µs": "本库，µs",
    "sequences": "序列",
    # cells
    "three passes: maximum, sum, write; one block a row":
        "三遍：求最大值、求和、写出；一行一个线程块",
    "the online recurrence, one thread a row": "在线递推，一行一个线程",
    "one block a row, states merged by warp shuffles": "一行一个线程块，状态用 warp shuffle 合并",
    "16-byte loads and stores, a vector absorbed at once": "16 字节读写，一次吸收一个向量",
    "the row stays in registers: one read, one write": "整行留在寄存器里：读一次，写一次",
    "a fixed grid loops over all rows": "固定大小的 grid，循环处理所有行",
    "several blocks a row, their states merged, then the write":
        "一行多个线程块，先合并状态，再写出",
    "safe's three reads in Triton: maximum, sum, write":
        "用 Triton 写的 safe，读三遍：求最大值、求和、写出",
    "the online recurrence in Triton: fold, write": "用 Triton 写的在线递推：先归约，再写出",
    "PyTorch's own softmax": "PyTorch 自带的 softmax",
    "torch.softmax under torch.compile": "torch.compile 编译后的 torch.softmax",
    "one read, one write and nothing else: the limit":
        "只读一次、写一次，别的什么都不做：这就是极限",
    "—: not timed.": "—：未计时。",
    "under 0.01": "小于 0.01",
    "under 0.1 %": "小于 0.1 %",
    "forward": "前向",
    "backward": "反向",
    "causal": "因果",
    "all keys": "全部键",
    # of docs/performance.md
    "operation": "操作",
    "cells": "格数",
    "of ceiling": "极限的几成",
    "mean": "平均",
    "over 10 % slower": "慢 10 % 以上",
    "worst cell": "最差的一格",
    "there": "那里",
    "ours, not batch invariant": "本库，不保证批不变",
    "cell": "格",
    "in place µs": "就地 µs",
    "in place x quack": "就地，相对 quack",
    "times": "倍数",
    "none": "无",
    "WRONG": "错",
    "contender": "参与者",
    "x three products": "相对三次乘法",
    "x four products": "相对四次乘法",
    "memory GB": "显存 GB",
    "error of the loss": "损失的误差",
    "of the input's gradient": "输入梯度的",
    "of the weight's": "权重梯度的",
    "ours, low": "本库，low",
    "ours, fast": "本库，fast",
    "three products": "三次乘法",
    "four products": "四次乘法",
    "torch, chunked": "torch，分块",
    "why": "原因",
    "heads": "头",
    "tokens": "token",
    "ceiling µs": "极限 µs",
    "all": "全部",
    "refuses": "拒绝",
    "on heads": "键头",
    "parts": "段",
    "rows": "行",
    "columns": "列",
    "call": "调用",
    "of torch": "相对 torch",
    "gradient recorded, µs": "记录梯度，µs",
    "of torch's": "相对 torch",
    "piece": "部分",
    "checks of the arguments": "检查参数",
    "choice of the route": "选择路线",
    "choice of the route, look-up of the launch": "选择路线，查找启动",
    "of a call unlike those before: checks of the arguments": "与先前不同的调用：检查参数",
    "of a call unlike those before: choice of the route": "与先前不同的调用：选择路线",
    "allocation": "申请内存",
    "look-up of the launch": "查找启动参数",
    "launch": "启动",
    "Python's rest": "Python 的其余部分",
    "of a call unlike those before: planning": "与先前不同的调用：规划",
    "of a call unlike those before: launch records": "与先前不同的调用：启动记录",
    "of the launch: the driver": "启动之中：驱动",
    "step": "步骤",
    "import online_softmax, beyond torch, from source":
        "导入 online_softmax，torch 之外，从源码编译字节码",
    "import online_softmax, beyond torch, bytecode on disk":
        "导入 online_softmax，torch 之外，字节码在磁盘上",
    "first call, kernel on disk": "第一次调用，kernel 在磁盘上",
    "a further kernel, on disk": "再一个 kernel，在磁盘上",
    "a later call": "以后的调用",
    "first call, nothing on disk": "第一次调用，磁盘上什么都没有",
    "a further kernel, nothing on disk": "再一个 kernel，磁盘上什么都没有",
    "what is computed": "算的是什么",
    "eager, ours µs": "eager，本库 µs",
    "compile, ours µs": "compile，本库 µs",
    "faster compiled": "编译后较快的",
    "without ours": "不用本库的",
    "with ours": "用本库的",
    "**Without a time**": "**没有时间的**",
    "**Of which, ours without a gradient**": "**其中，本库，不记录梯度**",
    "**In a fresh process**": "**在新的进程里**",
    "**The gradient made in the forward, 1.25 x quack aimed at**":
        "**在前向里算出梯度，目标是 quack 的 1.25 倍**",
    "**token_stats, in under 1.6 times of cross_entropy's forward**":
        "**token_stats，目标是在 cross_entropy 前向的 1.6 倍以内**",
    "## Cross-entropy and token_stats": "## 交叉熵与 token_stats",
    "## linear_cross_entropy": "## linear_cross_entropy",
    "## Attention": "## 注意力",
    "## Further operations": "## 其他操作",
    "Each contender's public function on 2²⁸ logits, the loss their mean: alone, with its gradient "
    "by the logits, and with the gradient made in the forward. Their cells are among the tables of "
    "all operations too; aimed at are 0.95 of a read for the loss, and 0.93 of a read and then a "
    "copy for both.":
        "各方的公开函数，2²⁸ 个 logits，损失取平均：单独的损失，连同对 logits 的梯度，"
        "以及在前向里算出梯度。这些格也在各操作的表里；目标是：损失达到只读的 0.95，"
        "连同梯度达到只读加拷贝的 0.93。",
    "Forward and backward of a linear layer and its cross-entropy, beside the matrix products "
    "alone, every call as it stands between two events. Memory is the most that was allocated at "
    "once beyond inputs and gradients. An error is the distance to the float64 gradient over that "
    "gradient's size, both as norms.":
        "一个线性层连同交叉熵的前向加反向，旁边是单独的矩阵乘，每次调用原样夹在两个 event 之间。"
        "显存是输入和梯度之外同时申请的最大量。误差是与 float64 梯度的距离除以那个梯度的大小，"
        "都按范数计。",
    "Forward and backward in TFLOP/s, half the products counted where causal, beside as many "
    "products as one matrix product of cuBLAS; decode in GB/s, beside a read of keys and values. "
    "Merges are in GB/s of the parts and the result: two parts beside an addition, which moves all "
    "but the log-sum-exps. More have a read of the parts alone beside them, without the write: "
    "counted with it, its speed passes the datasheet, so it is marked, and no share is given.":
        "前向和反向按 TFLOP/s，因果时乘法按一半计，旁边是同样多的乘法由 cuBLAS 做成一次矩阵乘；"
        "解码按 GB/s，旁边是把键和值读一遍。合并按各段加结果的 GB/s：两段的旁边是一次加法，除了 "
        "log-sum-exp 都搬。更多段的旁边只是把各段读一遍，没有写；把写也算进去，"
        "它的速度就超过规格书，所以带着记号，也不给几成。",
    # of its pictures
    "![attention: TFLOP/s by tokens of a sequence, ours, cuDNN and FlashAttention]"
    "(performance-attention.png)":
        "![attention：TFLOP/s，按序列的 token 数，本库、cuDNN 与 FlashAttention]"
        "(performance-attention.png)",
    "![attention_decode: GB/s by the keys of a sequence, ours and the rivals]"
    "(performance-attention_decode.png)":
        "![attention_decode：GB/s，按序列的键数，本库与各家](performance-attention_decode.png)",
    "![merge: GB/s by the number of parts, ours and torch](performance-merge.png)":
        "![merge：GB/s，按段数，本库与 torch](performance-merge.png)",
    "![linear_cross_entropy: time and memory, ours and the rivals]"
    "(performance-linear_cross_entropy.png)":
        "![linear_cross_entropy：时间和显存，本库与各家](performance-linear_cross_entropy.png)",
}  # fmt: skip
SAME = {"", "µs", "ms", "GB/s", "TFLOP/s", "—", "head_dim", "batch", "torch", "compile", "quack",
        "liger", "tutorial", "flash-attn", "cut-cross-entropy", "torch, flash", "torch, cudnn",
        "torch, efficient"}  # fmt: skip
# A whole cell or line; what a group takes in is kept.
SENTENCES = {
    r"x (\w+) \(goal\)": r"相对 \1（目标）",
    r"x (quack|compile|liger)": r"相对 \1",
    r"([\d.]+) \(over ([\d.]+)\)": r"\1（超过 \2）",
    r"([\d.]+) \(over\)": r"\1（超过）",
    r"(eager|compile|torch|quack|cross_entropy) µs": r"\1 µs",
    r"torch (\S+) has no linear_cross_entropy": r"torch \1 没有 linear_cross_entropy",
    r"!\[(\w+): share of the ceiling by columns, ours and the rivals\]\((\S+)\)":
        r"![\1：本库与各家达到极限的几成，按列数](\2)",
    r"\*\*(\w+ \w+), (TFLOP/s|GB/s)\*\*": r"**\1，\2**",
    r"\*\*(linear_cross_entropy \w+), ([\d,]+) tokens, ([\d,]+) features, ([\d,]+) "
    r"classes\*\*":
        r"**\1，\2 个 token，\3 个特征，\4 个类别**",
    r"\*\*Host cost of an eager call, (.+)\*\*": r"**一次 eager 调用的主机端开销，\1**",
    r"what `softmax` picks here: (\w+)": r"`softmax` 在这里选的：\1",
    r"—: (\w+) holds at most (\d+) columns \((\d+) threads x (\d+) elements\); this row has "
    r"(\d+)\.":
        r"—：\1 最多容纳 \2 列（\3 个线程 x \4 个元素），这一行有 \5 列。",
    r"(.+) on an (.+); reads and exponentials per element; cold L2, median of three interleaved "
    r"rounds; torch (\S+)\. Raw data: (\[.+\]\(.+\))\.":
        r"\1，\2；读和指数都按每元素计；冷 L2，三轮交错测量取中位数；torch \3。原始数据：\4。",
    r"(.+), cold L2; GB/s counts one read and one write\.":
        r"\1，冷 L2；GB/s 按读一次、写一次计。",
    r"Bytes per element, (.+?), (NVIDIA .+); caches emptied before each kernel, planned block "
    r"sizes\. An element is (\d) bytes; the prediction is reads that the algorithm has, times "
    r"that\.":
        r"每元素字节数，\1，\2；每个 kernel 运行前清空缓存，线程块大小按规划。一个元素 \3 字节；"
        r"预测值是算法读的次数乘以这个字节数。",
    r"TFLOP/s, bfloat16, one sequence of 16,384 tokens and 2,048 features; half the products "
    r"count where causal, 2\.5 times as many in a backward\. (.+), (\S+), commit (\w+), torch "
    r"(\S+), Triton (\S+); contenders interleaved, median of three rounds\.":
        r"TFLOP/s，bfloat16，一条 16,384 个 token、2,048 个特征的序列；因果时乘法按一半计，"
        r"反向按前向的 2.5 倍计。"
        r"\1，\2，commit \3，torch \4，Triton \5；各方交错测量，三轮取中位数。",
    r"GB/s of keys and values, bfloat16, one query of 32 heads on 8 heads of keys, head_dim 128; "
    r"calls in a graph, without the host's part\. (.+), (\S+), commit (\w+), torch (\S+), Triton "
    r"(\S+); contenders interleaved, median of three rounds\.":
        r"读键和值的 GB/s，bfloat16，一个查询，32 个头对 8 个键头，head_dim 128；"
        r"调用放在 CUDA graph 里，不含主机端开销。"
        r"\1，\2，commit \3，torch \4，Triton \5；各方交错测量，三轮取中位数。",
    r"GB/s of keys and values, bfloat16, one query of 32 heads on 8 heads of keys, head_dim 128; "
    r"the host's part of a call is in its time\. (.+), (\S+), commit (\w+), torch (\S+), Triton "
    r"(\S+); contenders interleaved, median of three rounds\.":
        r"读键和值的 GB/s，bfloat16，一个查询，32 个头对 8 个键头，head_dim 128；"
        r"时间里包含一次调用的主机端开销。"
        r"\1，\2，commit \3，torch \4，Triton \5；各方交错测量，三轮取中位数。",
}  # fmt: skip
_RUN = r"- (.+?), driver (.+), commit (\w+); "
for _english, _chinese in (
    (r"CUDA graph of calls over rotating buffers of at least 3 x L2; contenders interleaved; "
     r"median of three rounds\.",
     "CUDA graph 里的调用轮流使用至少 3 x L2 的缓冲区；各方交错测量，三轮取中位数。"),
    (r"Events around each call\. Contenders interleaved; median of all rounds\.",
     "每次调用前后各一个 event。各方交错测量，取所有轮次的中位数。"),
):  # fmt: skip
    SENTENCES[rf"{_RUN}(\S+) to (\S+)\. {_english}"] = (
        rf"- \1，驱动 \2，commit \3；\4 到 \5。{_chinese}"
    )
    SENTENCES[rf"{_RUN}(\S+)\. {_english}"] = rf"- \1，驱动 \2，commit \3；\4。{_chinese}"
LESSON = re.compile(r"\]\(docs/lessons/(\w+)\.md\)")
CODE = re.compile(r"(\[`[\w.]+`\]\([\w./]+\)|`[\w.]+`)")
TYPE = "(float32|float16|bfloat16)"
FIGURE = re.compile(  # numbers, sizes, names of cells, what a compiled model computes
    rf"[\d,.]+(e-\d+)?( %)?[*!]?( \([\d.]+\))?|[\d,]+ x [\d,]+( {TYPE})?"
    rf"|(\w+ )?{TYPE}( [\d,]+ x [\d,]+)?|\w+\(.*x \* a.*\).*"
)


def said(body: str) -> str:
    """What stands between two markers, in Chinese.

    >>> print(said("| rung | µs |\\n| --- | ---: |\\n| `safe` | 63.7 |"))
    | 台阶 | µs |
    | --- | ---: |
    | `safe` | 63.7 |

    Raises ValueError for words that this file does not have.
    """
    return "\n".join(
        _line(line) for line in LESSON.sub(r"](docs/lessons/\1.zh.md)", body).split("\n")
    )


def _line(line: str) -> str:
    if not line or set(line) <= set("|-: "):
        return line
    if line.startswith("|"):
        cells = (_phrase(cell) for cell in line.strip("|").split("|"))
        return "| " + " | ".join(cells) + " |"
    return _phrase(line)


def _phrase(text: str) -> str:
    """A cell or a line beneath a table."""
    text = text.strip()
    if text in WORDS:
        return WORDS[text]
    if text in SAME or FIGURE.fullmatch(text) or CODE.fullmatch(text):
        return text
    for pattern, chinese in SENTENCES.items():
        if found := re.fullmatch(pattern, text):
            return found.expand(chinese)
    raise ValueError(f"no Chinese for {text!r}: put it into lab/chinese.py")
