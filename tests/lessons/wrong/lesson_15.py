"""Wrong routing policies."""

WRONG = {
    "counts blocks behind a hole": [
        (
            "sum(1 for _ in itertools.takewhile(self.seen.get(node, {}).__contains__, prompt))",
            "sum(block in self.seen.get(node, {}) for block in prompt)",
        )
    ],
    "forgets the beginning of a prompt first": [("for block in reversed(prompt):", "for block in prompt:")],
    "does not move what comes again to the end": [("            seen.pop(block, None)\n", "")],
    "remembers without end": [("while len(seen) > self.most:", "while False:")],
    "follows the prefix whatever the load": [
        ("able = [node for node, load in in_flight.items() if load <= most]", "able = list(in_flight)")
    ],
    "refuses a node at the bound": [("if load <= most]", "if load < most or load == min(in_flight.values())]")],
    "looks at the load alone": [("(self.matched(node, prompt), -in_flight[node])", "-in_flight[node]")],
    "breaks ties by the name only": [("(self.matched(node, prompt), -in_flight[node])", "self.matched(node, prompt)")],
    "trusts a node that was down": [
        ("        self.seen = {node: seen for node, seen in self.seen.items() if node in in_flight}\n", "")
    ],
    "does not remember what it sent": [("        self.remember(best, prompt)\n", "")],
    "fails when all are down": [("        if not in_flight:\n            return None\n", "")],
}
