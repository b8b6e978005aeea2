"""Finds stop strings in streamed text, across any chunk borders, and holds back text that may yet become one.

Pure. Guarantees: what comes out, joined, depends on the text alone and not on how it was cut; nothing is emitted that
belongs to a stop string; nothing is held back that cannot begin one. A stream rebuilt by feeding its text again is in
the same state.

The rule for several stop strings: the one that *ends* first wins, so that the decision needs no look-ahead and
generation stops at the earliest token; of those that end at the same place, the longest.

The method is the automaton of Aho and Corasick ("Efficient string matching: an aid to bibliographic search", CACM 18,
1975): its state is the longest suffix of the text that begins a stop string, which is exactly the text to hold back. It
is built lazily, one node for each prefix that the text really visits, so that a request with very many or very long
stop strings pays nothing for them in advance. Time is linear in the text.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from services.common.errors import EngineError, ErrorReason


@dataclass(frozen=True, slots=True)
class StopScan:
    """What one piece of text gave.

    Attributes:
        text: Text that is final and may be shown; possibly "".
        stop: The stop string that was found, after which the text has ended; None while there is none.
    """

    text: str
    stop: str | None = None


class _Node:
    """A prefix of at least one stop string: the stops ``[start, end)`` of the sorted list begin with it.

    Attributes:
        depth: Length of the prefix.
        fallback: The longest proper suffix of the prefix that is itself a prefix of a stop; None for the root only.
        match_length: Length of the longest stop that the prefix ends with; 0 when there is none.
        children: Visited continuations by character.
    """

    __slots__ = ("children", "depth", "end", "fallback", "match_length", "start")

    def __init__(self, start: int, end: int, depth: int, fallback: "_Node | None", match_length: int) -> None:
        self.start = start
        self.end = end
        self.depth = depth
        self.fallback = fallback
        self.match_length = match_length
        self.children: dict[str, _Node] = {}


class StopStrings:
    """Scanner of one generation's text.

    Args:
        stops: Non-empty strings; duplicates count once; none at all lets everything through.
        include_stop: Whether the stop string itself is shown. Nothing is held back then.

    Raises:
        EngineError: INVALID_REQUEST, when a stop string is empty.
    """

    def __init__(self, stops: Iterable[str], *, include_stop: bool = False) -> None:
        # Sorted, the stops that share a prefix are neighbours, and one that equals the prefix is the first of them.
        self._stops = sorted(set(stops))
        if self._stops and not self._stops[0]:
            raise EngineError(ErrorReason.INVALID_REQUEST, "A stop string must not be empty.", field="stop")
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._includes_stop = include_stop
        self._root = _Node(0, len(self._stops), 0, None, 0)
        self._node = self._root
        self._found: str | None = None

    @property
    def found(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._found

    def feed(self, text: str) -> StopScan:
        """Take the next piece of text, of any length.

        After a stop string was found the text has ended: the rest of the piece and all later pieces are dropped.
        """
        if self._found is not None:
            return StopScan("", self._found)
        if not self._stops:
            return StopScan(text)
        before, node, root, step = self._node, self._node, self._root, self._step
        first_characters = self._first_characters
        for index, character in enumerate(text):
            if node is root and character not in first_characters:
                continue  # nearly all text
            node = step(node, character)
            if node.match_length:
                return self._finish(before, text[: index + 1], node)
        self._node = node
        return StopScan(text if self._includes_stop else self._release(before, text, num_held=node.depth))

    def flush(self) -> str:
        """End the text and give what was held back; "" after a match or on a second call."""
        held = "" if self._includes_stop else self._prefix(self._node)
        self._node = self._root
        return held

    def _finish(self, before: _Node, text: str, node: _Node) -> StopScan:
        """Record a match at the end of ``text``, and give what precedes it."""
        self._found = self._prefix(node)[node.depth - node.match_length :]
        self._node = self._root
        shown = text if self._includes_stop else self._release(before, text, num_held=node.match_length)
        return StopScan(shown, self._found)

    def _release(self, before: _Node, text: str, *, num_held: int) -> str:
        """Give all but the last ``num_held`` characters of what was held at ``before`` followed by ``text``.

        The held text needs no buffer: it is the prefix that the state stands for.
        """
        if num_held <= len(text):
            return self._prefix(before) + text[: len(text) - num_held]
        return self._stops[before.start][: before.depth + len(text) - num_held]

    def _prefix(self, node: _Node) -> str:
        return self._stops[node.start][: node.depth] if node.depth else ""

    def _step(self, node: _Node, character: str) -> _Node:
        """Follow one character, creating the nodes that are visited for the first time.

        Along the fallback chain of ``node``, every node that some stop continues with ``character`` gets its child;
        each child's fallback is the next one found further down, and the last falls back to a known node or the root.
        """
        created: list[tuple[_Node, int, int]] = []
        at: _Node | None = node
        target = self._root
        while at is not None:
            known = at.children.get(character)
            if known is not None:
                target = known
                break
            start, end = self._continuations(at, character)
            if start < end:
                created.append((at, start, end))
            at = at.fallback
        for parent, start, end in reversed(created):
            depth = parent.depth + 1
            is_stop = len(self._stops[start]) == depth
            target = _Node(start, end, depth, target, depth if is_stop else target.match_length)
            parent.children[character] = target
        return target

    def _continuations(self, node: _Node, character: str) -> tuple[int, int]:
        """Range of the node's stops whose next character is ``character``; empty when there are none."""
        depth, stops = node.depth, self._stops
        first = node.start + (len(stops[node.start]) == depth)
        start = bisect_left(stops, character, first, node.end, key=lambda stop: stop[depth])
        return start, bisect_right(stops, character, start, node.end, key=lambda stop: stop[depth])
