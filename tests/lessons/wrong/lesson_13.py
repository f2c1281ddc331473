"""Wrong queues of chunks."""

WRONG = {
    "fifo whatever was asked for": [('of.size if self.order == "shortest" else 0', "0")],
    "shortest goes by the chunk": [
        ('of.size if self.order == "shortest" else 0', 'of.chunks[0][1].num_blocks if self.order == "shortest" else 0')
    ],
    "shortest: equal rooms by name": [
        ("of.chunks[0][0]))", 'of.chunks[0][1].room if self.order == "shortest" else of.chunks[0][0]))')
    ],
    "two chunks of a room at once": [(" and not of.writing]", "]")],
    "hands out before D has said where to": [("of.chunks and of.size is not None and", "of.chunks and")],
    "a failed room goes on": [
        ("            of.end = Poll.FAILED\n            of.chunks.clear()", "            of.end = Poll.FAILED")
    ],
    "chunks of a failed room are taken in later": [
        ("        if of.end is None:\n            of.chunks", "        if True:\n            of.chunks")
    ],
    "one failure fails all": [
        (
            "            of.end = Poll.FAILED\n",
            "            for of in self.rooms.values():\n                of.end = Poll.FAILED\n                of.chunks.clear()\n",
        )
    ],
    "success when nothing is left": [("        elif chunk.last:", "        elif not of.chunks:")],
    "success when it is handed out": [
        (
            "        return of.chunks.popleft()[1]",
            "        chunk = of.chunks.popleft()[1]\n        of.end = Poll.SUCCESS if chunk.last else None\n        return chunk",
        )
    ],
    "an old life's end is remembered": [
        ("if room not in self.rooms or self.rooms[room].end:", "if room not in self.rooms:")
    ],
    "opening again empties the room": [
        ("if room not in self.rooms or self.rooms[room].end:", "if room not in self.rooms or self.rooms[room].size:")
    ],
    "a failed chunk is tried again": [
        (
            "            of.end = Poll.FAILED\n            of.chunks.clear()",
            "            of.chunks.appendleft((0, chunk))",
        )
    ],
    "transferring from the first push on": [("Poll.TRANSFERRING if of.begun", "Poll.TRANSFERRING if of.num_pushed")],
}
