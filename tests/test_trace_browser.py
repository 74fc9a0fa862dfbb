"""The page of trace --html in Chromium: steps, keys, tree, attention, errors, links."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from browser_kit import open_page
from trace_kit import address, alike, shown, written


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("page"))


def test_steps_by_buttons_and_keys(path: Path):
    with open_page(path, locale="en-US") as page:
        place, live = page.locator("#place"), page.locator("#live")
        assert place.inner_text() == "step 1 of 2"
        page.get_by_role("button", name="Next", exact=True).click()
        assert live.text_content() == (
            "Step 2 of 2: reads 9, 2. m goes from 5 to 9. Old d times 0.01832, new part times 1: "
            "d 1.022."
        )
        assert shown(page, "#steps")[1] == ["2", "9  2", "9", "0.01831564", "1", "1.022042", "4"]
        assert " ".join(page.locator("#equation").inner_text().split()) == (
            "m = max( 5 old m , 9 block m ) = 9 m d = 1.154 old d × 0.01832 exp(5 − 9) + 1.001 "
            "block d × 1 exp(9 − 9) = 1.022 d"
        )
        page.keyboard.press("ArrowRight")  # the end: it stays, and keeps the keys
        assert place.inner_text() == "step 2 of 2"
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert place.inner_text() == "step 0 of 2"
        assert "Nothing was read yet" in page.locator("#equation").inner_text()
        assert shown(page, "#steps")[0][2:] == [""] * 5
        page.keyboard.press("End")
        assert place.inner_text() == "step 2 of 2"
        page.keyboard.press("Home")
        assert place.inner_text() == "step 0 of 2"
        page.get_by_role("button", name="Go to step 2").press("Enter")
        assert page.evaluate("document.activeElement.textContent") == "2"
        page.keyboard.press("ArrowLeft")
        assert place.inner_text() == "step 1 of 2"
        page.keyboard.press("End")
        page.locator("#numbers").press("ArrowLeft")  # in a field an arrow moves the cursor
        assert place.inner_text() == "step 2 of 2"
        page.locator("#slider").press("ArrowLeft")
        assert place.inner_text() == "step 1 of 2"
        page.get_by_role("button", name="Start").click()
        assert page.locator("#start").get_attribute("aria-disabled") == "true"


def test_play_goes_to_the_end(path: Path):
    with open_page(path, locale="en-US") as page:
        page.clock.install()
        page.goto(address(path, "x=1,2,3&block=1&step=0"))
        page.reload()
        page.get_by_role("button", name="Play").click()
        page.clock.run_for(1500)
        assert page.locator("#place").inner_text() == "step 1 of 3"
        page.get_by_role("button", name="Pause").click()
        page.clock.run_for(5000)
        assert page.locator("#place").inner_text() == "step 1 of 3"
        page.keyboard.press("p")
        page.clock.run_for(5000)
        assert page.locator("#place").inner_text() == "step 3 of 3"
        assert page.locator("#play").inner_text() == "Play"


def test_bars_move(path: Path):
    heights = "all => all.map((each) => new DOMMatrix(getComputedStyle(each).transform).d)"
    with open_page(path, reduced_motion="reduce") as page:
        bars = "#strips .weights .bar"
        first = page.eval_on_selector_all(bars, heights)
        alike(first, [math.exp(-4), 1, math.exp(-2), 0, 0], 1e-4, 1e-6)
        page.keyboard.press("ArrowRight")
        second = page.eval_on_selector_all(bars, heights)
        alike(second, [math.exp(x - 9) for x in (1, 5, 3, 9, 2)], 1e-3, 1e-6)
        assert page.locator("#strips .levels .value").inner_text() == "9"
        assert (
            page.eval_on_selector(bars, "bar => getComputedStyle(bar).transitionDuration") == "0s"
        )
    with open_page(path) as page:
        moves = page.eval_on_selector(bars, "bar => getComputedStyle(bar).transitionDuration")
        assert moves.startswith("0.45s")


def test_the_tree_by_keyboard_and_pointer(path: Path):
    with open_page(address(path, "x=1,5,3,9,2&block=1"), locale="en-US") as page:
        nodes, detail = page.locator(".node"), page.locator("#tree-detail")
        assert nodes.count() == 9
        root = page.locator(".node[tabindex='0']")
        assert root.count() == 1
        assert root.get_attribute("aria-label") == "blocks 1 to 5: m 9, d 1.022"
        root.focus()
        page.keyboard.press("ArrowUp")
        assert "blocks 1 to 2 and blocks 3 to 4 merged:" in detail.inner_text()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowRight")
        assert "block 3 and block 4 merged:" in detail.inner_text()
        assert "exp(3 − 9)" in detail.inner_text()
        assert page.locator("#place").inner_text() == "step 1 of 5"  # those arrows were the tree's
        page.keyboard.press("ArrowDown")
        assert "blocks 1 to 2 and blocks 3 to 4 merged:" in detail.inner_text()
        nodes.first.hover()
        assert "Block 1 reads 1: its maximum" in detail.inner_text()
        assert page.locator(".node[tabindex='0']").count() == 1
        assert page.locator("#tree-root").inner_text() == (
            "Root: m 9, d 1.022042. The walk above ends with d 1.022042."
        )


def test_attention_tab(path: Path):
    with open_page(path, locale="en-US") as page:
        page.get_by_role("tab", name="A row").press("ArrowRight")
        assert page.locator("#attention-panel").is_visible()
        assert not page.locator("#row-panel").is_visible()
        assert page.evaluate("document.activeElement.id") == "attention-tab"
        page.locator("#next").click()
        assert shown(page, "#attention-steps")[1] == [
            "2", "2–3", "1.5  −4.5", "1.5", "0.60653", "1", "1.8321", "−0.72408  −1.0353",
        ]  # fmt: skip
        outputs = shown(page, "#outputs")
        assert outputs[0] == ["0", *["0.18441  −1.06"] * 3, "2.9079"]
        page.get_by_role("radio", name="Show query 1").check()
        assert "1.2231" in page.locator("#attention-steps").inner_text()
        page.get_by_label("causal").check()
        assert page.locator(".score.hidden").count() == 1
        page.get_by_label("mask").check()  # the last key, as if it were padding
        assert page.locator(".score.hidden").count() == 2
        page.get_by_role("button", name="Hide key 0 from query 1").press("Enter")
        assert page.locator(".score.hidden").count() == 3
        assert page.evaluate("document.activeElement.ariaPressed") == "true"
        page.wait_for_url(re.compile("mask=111110.011110"))
        assert page.locator("#attention-command").inner_text() == ""
        page.get_by_label("mask").uncheck()
        assert page.locator("#attention-command").inner_text() == (
            "online-softmax trace --attention --causal"
        )


def test_attention_of_other_sizes_and_errors(path: Path):
    with open_page(address(path, "tab=attention"), locale="en-US") as page:
        page.locator("summary").click()
        page.fill("#fill-queries", "9")
        page.get_by_role("button", name="Fill", exact=True).click()
        error = page.locator("#fill-queries-error")
        assert error.inner_text() == "queries: give at most 8, not 9"
        page.fill("#fill-queries", "3")
        page.fill("#fill-keys", "5")
        page.get_by_role("button", name="Fill", exact=True).click()
        assert error.inner_text() == ""
        assert len(shown(page, "#outputs")) == 3
        assert page.locator("#attention-command").inner_text() == (
            "online-softmax trace --attention --queries 3 --keys 5"
        )
        for field, text, why in (
            ("k", "1 2 3\n4 5", "line 2 has 2 numbers, line 1 has 3"),
            ("k", "1 2 3", "a key has 3 numbers, a query 4: give as many"),
            ("v", "1\n2", "there are 2 values and 5 keys: give one a key"),
            ("q", "", "give at least one line of numbers"),
            ("q", "1 2 x 4", "'x' is not a number"),
            ("tile", "0", "0: give a whole number, at least 1"),
        ):
            before = page.locator(f"#{field}").input_value()
            page.fill(f"#{field}", text)
            assert page.locator(f"#{field}-error").inner_text() == why
            assert page.locator(f"#{field}").get_attribute("aria-invalid") == "true"
            page.fill(f"#{field}", before)
            assert page.locator("[aria-invalid]").count() == 0
        page.fill("#q", "inf 1 1 1")  # scores of +inf or NaN are shown as what they are
        assert "NaN" in page.locator("#outputs").inner_text()


def test_an_error_stands_at_its_field_and_what_was_shown_stays(path: Path):
    with open_page(address(path, "x=1,two,3&block=0"), locale="en-US") as page:
        assert page.locator("#numbers").input_value() == "1 two 3"
        assert page.locator("#numbers-error").inner_text() == "'two' is not a number"
        assert page.locator("#block-error").inner_text() == "0: give a whole number, at least 1"
        assert len(shown(page, "#results")) == 6  # of the worked example
        page.fill("#block", "2")
        page.fill("#numbers", "1 2")
        assert page.locator("[aria-invalid]").count() == 0
        assert len(shown(page, "#results")) == 3
        page.fill("#numbers", "")
        assert page.locator("#numbers-error").inner_text() == "trace needs at least one number"
        page.fill("#numbers", "1 " * 65)
        said = page.locator("#numbers-error").inner_text()
        assert said == "Numbers: give at most 64, not 65"
        assert len(shown(page, "#results")) == 3
        page.fill("#numbers", "<img src=x onerror=alert(1)>")
        assert "'<img' is not a number" in page.locator("#numbers-error").inner_text()


def test_a_link_keeps_all(path: Path):
    row = "x=1,-inf,3&block=2&step=2&type=float64&lang=zh"
    tiles = (
        "tab=attention&q=1,2;0,1&k=1,0;0,1;2,2&v=1;2;3&tile=2&causal=1&query=1&mask=101.110&step=1"
    )
    for link in (row, tiles):
        with open_page(address(path, link), locale="en-US") as page:
            assert page.url == address(path, link)
            before = page.locator("main").inner_text()
            page.reload()
            assert page.locator("main").inner_text() == before
            page.evaluate("location.hash = 'x=7,8&block=1&step=0'")  # as from the address bar
            page.locator("#place", has_text="step 0 of 2").wait_for()
            assert page.locator("#numbers").input_value() == "7 8"


def test_a_link_given_while_another_is_to_be_written_wins(path: Path):
    """A step writes its link a little later; between a new one and its event that must not be."""
    with open_page(path, locale="en-US") as page:
        page.evaluate(
            """() => {
              document.querySelector("#next").click();
              location.hash = "x=7,8&block=1&step=0";
              dispatchEvent(new Event("pagehide"));  // writes at once, as the timer may
            }"""
        )
        page.locator("#place", has_text="step 0 of 2").wait_for()
        assert page.locator("#numbers").input_value() == "7 8"
        page.locator("#next").click()
        page.wait_for_url(re.compile("x=7,8&block=1&step=1"))


def test_a_link_of_words_that_every_object_has(path: Path):
    with open_page(address(path, "lang=constructor&type=toString"), locale="en-US") as page:
        assert page.title() == "Online softmax, step by step"
        assert page.locator("html").get_attribute("lang") == "en"
        assert page.get_by_role("button", name="float32").get_attribute("aria-pressed") == "true"
        assert "d 1.154" in page.locator("#live").text_content()


def test_a_link_does_not_join_two_numbers(path: Path):
    with open_page(address(path, "x=1;2;3"), locale="en-US") as page:
        assert page.locator("#numbers").input_value() == "1;2;3"
        assert page.locator("#numbers-error").inner_text() == "'1;2;3' is not a number"
