"""Two texts beside each other, with the words that differ marked."""

from reinforge.runs.page.differences import MAX_WORDS, ChangedReply, build_change, mark_difference
from reinforge.runs.page.elements import build, to_html


def write(before, after):
    return [
        to_html(build("p", parts)).removeprefix("<!DOCTYPE html>\n<p>").removesuffix("</p>\n")
        for parts in mark_difference(before, after)
    ]


def test_words_that_differ_are_marked():
    assert write("a black cat", "a cat") == ["a <del>black </del>cat", "a cat"]
    assert write("It is 41.", "It is\n42.") == ["It is <del>41.</del>", "It is\n<ins>42.</ins>"]
    assert write("", "new") == ["", "<ins>new</ins>"]
    assert write("same", "same") == ["same", "same"]


def test_text_is_never_markup():
    assert write("<b>", "<i>") == ["<del>&lt;b&gt;</del>", "<ins>&lt;i&gt;</ins>"]


def test_a_long_text_is_compared_at_its_beginning():
    before, after = write("word " * (MAX_WORDS + 5), "word " * MAX_WORDS + "end")
    assert before.endswith("word … (5 more words)")
    assert after.endswith("word … (1 more words)")


def test_a_change_has_the_question_and_both_replies():
    text = to_html(
        build_change(
            "q1", "6 × 7?", (ChangedReply("before, 0", "41"), ChangedReply("after, 1", "")), build("p", "more")
        )
    )
    assert (
        '<div><h3>q1</h3><p class="note">6 × 7?</p></div><div><h4>before, 0</h4><pre><del>41</del></pre></div>' in text
    )
    assert "<div><h4>after, 1</h4><pre>(nothing)</pre></div><p>more</p></article>" in text
