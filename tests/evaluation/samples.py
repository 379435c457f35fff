"""An item of each official task, as it stands in the folder of benchmark files."""

ARC = {
    "question": "What is free?",
    "choices": {"text": ["land", "work", "law", "peace"], "label": ["A", "B", "C", "D"]},
    "answerKey": "B",
}
SAMPLES = {
    "arc_challenge/test": ARC,
    "arc_easy/test": ARC,
    "boolq/validation": {"passage": "The state is free.", "question": "is the state free", "label": 1},
    "copa/validation": {
        "premise": "The war ended.",
        "choice1": "There was peace.",
        "choice2": "There was war.",
        "question": "effect",
        "label": 0,
    },
    "lambada_openai/test": {"text": "The free people of the nation must work for peace"},
    "piqa/validation": {"goal": "Find peace", "sol1": "work for it", "sol2": "make war", "label": 0},
    "wikitext2_raw/test": {"page": " = Peace = \n \n The nation , which is free , works . \n"},
    "winogrande/validation": {
        "sentence": "The state served the people because _ was free.",
        "option1": "the state",
        "option2": "the people",
        "answer": "1",
    },
}
BLIMP = {"sentence_good": "The people are free.", "sentence_bad": "The people is free."}
