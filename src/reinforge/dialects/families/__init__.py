"""Model families: how each writes tool calls and reasoning, one short file a family or group, behind one port."""
