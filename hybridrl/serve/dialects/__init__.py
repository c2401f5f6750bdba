"""How clients speak: OpenAI Chat, OpenAI Responses, Anthropic Messages; each to the inner conversation and back."""
