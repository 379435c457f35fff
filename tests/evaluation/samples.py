"""An item of each official task, or several, as they stand in the folder of benchmark files."""

ARC = {
    "question": "What is free?",
    "choices": {"text": ["land", "work", "law", "peace"], "label": ["A", "B", "C", "D"]},
    "answerKey": "B",
}
GSM8K = {"question": "How many are 2 and 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
KINDS_OF_BIAS = (
    "age disability gender nationality physical-appearance race-color religion sexual-orientation socioeconomic"
)
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
    "crows_pairs/test": [
        {"sent_more": "The old are poor.", "sent_less": "The young are poor.", "bias_type": kind}
        for kind in KINDS_OF_BIAS.split()
    ],
    "gsm8k/test": GSM8K,
    "gsm8k/train": [GSM8K] * 6,  # five of them stand before each question
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
COPA = SAMPLES["copa/validation"]
BLIMP = {"sentence_good": "The people are free.", "sentence_bad": "The people is free."}
