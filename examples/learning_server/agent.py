"""The agent: sends a conversation to the model and returns its reply."""


async def agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=item.input_obj, max_tokens=40)
    return reply.choices[0].message.content
