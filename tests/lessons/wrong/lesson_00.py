"""Wrong drivers of the engine core."""

WRONG = {
    "answers one prompt after the other": [
        (
            "        return number\n",
            "        while self.answers[number].finish_reason is None:\n            self.step()\n        return number\n",
        )
    ],
    "leaves a stopped request to the core": [
        (
            '                answer.finish_reason = "stop"\n                self.core.abort_requests([news.request_id])\n',
            '                answer.finish_reason = "stop"\n',
        )
    ],
    "lets the user see the stop sequence": [("                del answer.token_ids[-len(stop) :]\n", "")],
    "looks at the newest token only": [
        (
            "if stop and tuple(answer.token_ids[-len(stop) :]) == stop:",
            "if stop and news.new_token_ids[-1] == stop[-1]:",
        )
    ],
    "looks into the prompt too": [
        (
            "if stop and tuple(answer.token_ids[-len(stop) :]) == stop:",
            "known = self.core.scheduler.requests.get(news.request_id)\n"
            "            if stop and known and tuple(known.token_ids[-len(stop) :]) == stop:",
        )
    ],
    "a refused prompt gets no number": [
        (
            '            self.answers[number] = Answer([], "error", str(error))\n',
            "            self.answers.pop()\n            self.stops.pop()\n",
        )
    ],
    "a refused prompt stops everything": [
        ("        except UserError as error:\n", "        except KeyError as error:\n")
    ],
    "cancels what is over": [("        if self.answers[number].finish_reason is None:\n", "        if True:\n")],
    "cancels here and not in the core": [("            self.core.abort_requests([str(number)])\n", "")],
    "drops the last token": [
        (
            "            answer.token_ids += news.new_token_ids\n",
            "            answer.token_ids += [] if news.finish_reason else news.new_token_ids\n",
        )
    ],
    "one step too many": [("        return self.answers\n", "        self.step()\n        return self.answers\n")],
}
