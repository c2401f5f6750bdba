"""Conversations as tokens: turns, their images, tool-call parsers, and the log of a session; for agents and servers."""
