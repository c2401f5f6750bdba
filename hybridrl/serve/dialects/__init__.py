"""The APIs of clients, translated to the inner conversation and back: OpenAI Chat and Responses, Anthropic Messages."""
