"""A taskset of a project."""

import verifiers.v1 as vf


class Words(vf.Taskset):
    def load(self):
        for word in ("one", "two", "three"):
            yield vf.Task(vf.TaskData(prompt=f"Say {word}.", system_prompt="Be short.", answer=word))


__all__ = ["Words"]
