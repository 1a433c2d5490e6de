"""The three jobs of the application: their requests, and what is right.

tickets   a support e-mail            ->  {"product":"lamp","issue":"wrong_item","priority":"low","refund":true}
tool      a question at the counter   ->  quote(item="lamp", count=3) or compute(left=17, operator="plus", right=8)
label     a message to the company    ->  billing, shipping, technical, account or sales

Requests come from seeded templates, so that every process of the example knows the same ones.
"""

import json
import random
from functools import cache
from itertools import islice

from reinforge.tasks.shop.questions import OPERATORS, write_question
from reinforge.tasks.tickets.grammar import write_email
from reinforge.tasks.tickets.ticket import format_ticket
from reinforge.traces.replacement import agrees
from reinforge.types.evaluation import EvalInputItem

NUM_DRAWN = 4000
MOST_REQUESTS = 1600
"""Different requests of each job, at least: the first are recorded, the next are for the trial of the router."""
TEAMS = {
    "billing": [
        "I was charged twice for {month}.",
        "The invoice of {month} shows {price} dollars too much.",
        "Why did you take {price} dollars from my card?",
        "Please send me a receipt for {price} dollars.",
        "My direct debit of {month} bounced, can you collect it again?",
    ],
    "shipping": [
        "My parcel {number} has been at the depot since {day}.",
        "The courier left box {number} with a neighbor I do not know.",
        "Can you deliver on {day} instead?",
        "The tracking page of {number} has not changed since {day}.",
        "Half of delivery {number} is missing.",
    ],
    "technical": [
        "The app closes as soon as I open page {number}.",
        "Error {number} appears whenever I press save.",
        "Since the update on {day} the scanner does not connect.",
        "The screen stays black after step {number} of the setup.",
        "Exports from {month} come out as empty files.",
    ],
    "account": [
        "I forgot the password of user {number}.",
        "Please change my e-mail address before {day}.",
        "I cannot log in since {day}, it says that I am locked out.",
        "Delete my profile {number} and everything you know about me.",
        "My colleague needs access to our workspace from {day} on.",
    ],
    "sales": [
        "What does a license for {number} seats cost?",
        "Could someone show us the product on {day}?",
        "Is there a discount if we buy for {price} dollars or more?",
        "We compare three vendors until {month}, please send an offer.",
        "Does the larger plan include {number} sites?",
    ],
}
OPENINGS = ["Hello,", "Hi there!", "Good morning.", "Dear team,", "Quick question:", "Hey,", "To whom it may concern:"]
CLOSINGS = ["Thanks!", "Please answer soon.", "Regards, Mira", "It is not urgent.", "I am on {phone}.", "Best, Tom"]
SLOTS = {
    "month": ["January", "March", "May", "June", "August", "October", "December"],
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"],
}
PROMPTS = {
    "tickets": "File the e-mail as JSON: product, issue, priority (low, normal or high) and refund (true or false).",
    "tool": "You are a clerk. Call the right tool.",
    "label": f"Which team is this for? Answer with one word: {', '.join(TEAMS)}.",
}
"""Name of a job -> its system prompt."""


WORDS = {sign: word for word, sign in OPERATORS.items()}


def describe_tool(name, description, **types):
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    describe_tool("quote", "Returns the price of several pieces of one article.", item="string", count="integer"),
    describe_tool("compute", "Adds, subtracts or multiplies.", left="integer", operator="string", right="integer"),
]


def write_message(rng):
    team = rng.choice(list(TEAMS))
    slots = {name: rng.choice(values) for name, values in SLOTS.items()}
    slots |= {"number": rng.randrange(2, 1000), "price": rng.randrange(20, 500), "phone": rng.randrange(10**6, 10**7)}
    parts = [rng.choice(each) for each in (OPENINGS, TEAMS[team], CLOSINGS)]
    return " ".join(parts).format(**slots), team


def write_task(job, rng):
    """Returns the user's text and the message that answers it."""
    if job == "tickets":
        email = write_email(rng)
        return email.text, {"role": "assistant", "content": format_ticket(email.ticket)}
    if job == "label":
        text, team = write_message(rng)
        return text, {"role": "assistant", "content": team}
    asked = write_question(rng)
    name, arguments = "compute", {"left": asked.count, "operator": WORDS[asked.operator], "right": asked.other}
    if asked.item is not None:
        name, arguments = "quote", {"item": asked.item, "count": asked.count}
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return asked.text, {"role": "assistant", "content": None, "tool_calls": [call]}


@cache
def read_answers(job):
    """Returns `{text: message}`, in the order of the requests."""
    rng = random.Random(f"replace {job}")
    return dict(write_task(job, rng) for _ in range(NUM_DRAWN))


def list_requests(job, start, count):
    """Returns bodies for chat completions."""
    tools = {"tools": TOOLS} if job == "tool" else {}
    return [
        {
            "model": "large-1",
            "messages": [{"role": "system", "content": PROMPTS[job]}, {"role": "user", "content": text}],
            **tools,
        }
        for text in islice(read_answers(job), start, start + count)
    ]


def find_job(messages):
    return next(job for job, prompt in PROMPTS.items() if prompt == messages[0]["content"])


def is_right(item):
    """The evaluator: 1.0 for what the rules say, as your staff or your database would; the large model is not asked."""
    right = read_answers(find_job(item.input_obj))[item.input_obj[-1]["content"]]
    return agrees(item.model_copy(update={"expected_output_obj": read_reply(right)}))


def read_reply(message):
    """Returns a reply as the rows of `reinforge replace` hold it: a string, or a message with calls of tools."""
    return [message] if message.get("tool_calls") else message["content"]


def rate(messages, reply):
    """Returns 1.0 if a message is the right reply."""
    item = EvalInputItem(
        id="", input_obj=messages, expected_output_obj=None, output_obj=read_reply(reply), full_dataset_entry={}
    )
    return is_right(item)
