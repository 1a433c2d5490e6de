"""Chats of a server and what people say of them, kept to train on."""
