"""Wrong samplers and detokenizers."""

WRONG = {
    "exponents that overflow": [
        ("math.exp((logit - best) / params.temperature)", "math.exp(logit / params.temperature)"),
        ("weights[token] >= params.min_p]", "weights[token] >= params.min_p * max(weights)]"),
    ],
    "multiplies by the temperature": [("(logit - best) / params.temperature", "(logit - best) * params.temperature")],
    "no temperature": [("(logit - best) / params.temperature", "logit - best")],
    "min-p as a probability": [("weights[token] >= params.min_p]", "weights[token] / sum(weights) >= params.min_p]")],
    "top-p before what was cut is scaled up": [
        (
            "total, before, count = sum(weights[token] for token in kept), 0.0, 0",
            "total, before, count = sum(weights), 0.0, 0",
        )
    ],
    "top-p without the token that reaches it": [
        ("before / total < params.top_p):", "(before + weights[kept[count]]) / total <= params.top_p):")
    ],
    "top-p may leave nobody": [("kept = kept[: params.top_k]", "kept = kept[: params.top_k - 1]")],
    "returns shares of all": [("weights[token] / before) for", "weights[token] / sum(weights)) for")],
    "a border belongs to the part before": [("        if u < end:\n", "        if u <= end:\n")],
    "draws the best": [("        if u < end:\n            return token\n", "        return token\n")],
    "falls off the end": [("    return kept[-1][0]\n", "    raise ValueError(u)\n")],
    "shows half characters": [('if whatever or not text.endswith("\\ufffd"):', "if True:")],
    "waits for ever": [("self._take_text(len(self._pending) > 4)", "self._take_text(False)")],
    "keeps the rest at the end": [("        self._take_text(finished)\n", "")],
    "holds the last letter only": [("for n in range(1, len(stop)) if", "for n in range(1, 2) if")],
    "holds nothing": [("held = 0 if finished else max(ends, default=0)", "held = 0")],
    "holds at the end too": [("held = 0 if finished else max(ends, default=0)", "held = max(ends, default=0)")],
    "holds the shortest": [("max(ends, default=0)", "min(ends, default=0)")],
    "the first stop string of the list": [("at, stop = min(found)", "at, stop = found[0]")],
    "shows the stop string": [("self.text = self._full[:at]", "self.text = self._full[: at + len(stop)]")],
    "decodes everything again": [
        (
            '        text = self._tokenizer.decode(self._pending) if self._pending else ""\n'
            '        if whatever or not text.endswith("\\ufffd"):\n'
            "            self._full += text\n"
            "            self._pending.clear()\n",
            "        text = self._tokenizer.decode(self._pending)\n"
            '        self._full = text if whatever else text.rstrip("\\ufffd")\n',
        )
    ],
}
