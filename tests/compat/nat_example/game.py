import random

LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


class Board:
    """Nine fields, `.` while they are free."""

    def __init__(self):
        self.fields = ["."] * 9

    def free(self):
        return [index for index, field in enumerate(self.fields) if field == "."]

    def winner(self):
        for line in LINES:
            found = {self.fields[int(index)] for index in line}
            if len(found) == 1 and found != {"."}:
                return found.pop()
        return None

    def __str__(self):
        return "\n".join("".join(self.fields[row : row + 3]) for row in (0, 3, 6))


def pick_randomly(board, rng: random.Random):
    return rng.choice(board.free())
