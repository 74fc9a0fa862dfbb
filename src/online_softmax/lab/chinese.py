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
    "cannot": "不支持",
    "not timed": "未计时",
    "under 0.01": "小于 0.01",
    "under 0.1 %": "小于 0.1 %",
    "forward": "前向",
    "backward": "反向",
    "causal": "因果",
    "all keys": "全部键",
}  # fmt: skip
SAME = {"µs", "GB/s", "—", "head_dim", "torch, flash", "torch, cudnn", "torch, efficient"}
# A whole cell or line; what a group takes in is kept.
SENTENCES = {
    r"what `softmax` picks here: (\w+)": r"`softmax` 在这里选的：\1",
    r"(\w+) holds at most (\d+) columns \((\d+) threads x (\d+) elements\); this row has (\d+)":
        r"\1 最多容纳 \2 列（\3 个线程 x \4 个元素），这一行有 \5 列",
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
LESSON = re.compile(r"\]\(docs/lessons/(\w+)\.md\)")
CODE = re.compile(r"(\[`[\w.]+`\]\([\w./]+\)|`[\w.]+`)")
FIGURE = re.compile(r"[\d,.]+( %)?|[\d,]+ x [\d,]+ (float32|float16|bfloat16)")


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
