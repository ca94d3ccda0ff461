"""Command R+ 104B 08-2024, Cohere's large chat model."""

model = dict(path="CohereLabs/c4ai-command-r-plus-08-2024")
architecture = "command_r_plus"
