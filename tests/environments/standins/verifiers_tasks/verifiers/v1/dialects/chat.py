def message_to_wire(message):
    return vars(message)
