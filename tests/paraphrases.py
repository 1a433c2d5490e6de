"""Pairs of questions by which the threshold of contamination by meaning was chosen."""

SAME = [
    ("How do I reset my password?", "How can I reset my password?"),
    ("What is the capital of Australia?", "Which city is Australia's capital?"),
    ("My parcel has not arrived yet. Where is it?", "Where is my parcel? It still has not arrived."),
    ("Can I get a refund for order 4711?", "Is it possible to get my money back for order 4711?"),
    ("Who wrote the novel Moby-Dick?", "Who is the author of the novel Moby-Dick?"),
    ("Translate 'good morning' into French.", "What is the French translation of 'good morning'?"),
    ("How many days are there in a leap year?", "What is the number of days in a leap year?"),
    ("Sam has 3 apples and buys 4 more. How many does he have?", "Sam owns 3 apples. He buys 4 more. How many now?"),
    ("Name the largest planet of the solar system.", "Which planet is the largest in the solar system?"),
    ("The app crashes when I open the settings.", "When I open the settings, the app crashes."),
    ("How long does delivery to Canada take?", "What is the delivery time to Canada?"),
    ("Sort the list 5, 2, 9 in ascending order.", "Put the list 5, 2, 9 into ascending order."),
    ("Please cancel my subscription.", "I would like to cancel my subscription, please."),
    ("Why is the sky blue?", "What makes the sky blue?"),
    ("What does HTTP status 404 mean?", "What is the meaning of HTTP status 404?"),
    ("Write a function that reverses a string.", "Implement a function to reverse a string."),
    ("At what temperature does water boil at sea level?", "What is the boiling point of water at sea level?"),
    ("I was charged twice for the same order.", "The same order was charged to me twice."),
    ("Summarize the plot of Hamlet.", "Give a summary of the plot of Hamlet."),
    ("Which languages are spoken in Switzerland?", "What languages do people speak in Switzerland?"),
]
"""Each asks twice for the same answer."""

NEAR = [
    ("What is 3 + 4?", "What is 3 + 5?"),
    ("What is the capital of Australia?", "What is the capital of Austria?"),
    ("How do I turn on notifications?", "How do I turn off notifications?"),
    ("Can I get a refund for order 4711?", "Can I get a refund for order 4712?"),
    ("Who wrote the novel Moby-Dick?", "Who wrote the novel Middlemarch?"),
    ("Translate 'good morning' into French.", "Translate 'good evening' into French."),
    ("How many days are there in a leap year?", "How many weeks are there in a leap year?"),
    ("Sam has 3 apples and buys 4 more. How many does he have?", "Sam has 3 apples and eats 2. How many does he have?"),
    ("Name the largest planet of the solar system.", "Name the smallest planet of the solar system."),
    ("The app crashes when I open the settings.", "The app crashes when I close the settings."),
    ("How long does delivery to Canada take?", "How much does delivery to Canada cost?"),
    ("Sort the list 5, 2, 9 in ascending order.", "Sort the list 5, 2, 9 in descending order."),
    ("Please cancel my subscription.", "Please renew my subscription."),
    ("Why is the sky blue?", "Why is the sea blue?"),
    ("What does HTTP status 404 mean?", "What does HTTP status 403 mean?"),
    ("Write a function that reverses a string.", "Write a function that reverses a list."),
    ("At what temperature does water boil at sea level?", "At what temperature does water freeze at sea level?"),
    ("Tom has two red cars. How many cars does he have?", "Tom has three red cars. How many cars does he have?"),
    ("Summarize the plot of Hamlet.", "Summarize the plot of Macbeth."),
    ("Which languages are spoken in Switzerland?", "Which languages are spoken in Sweden?"),
]
"""Each asks for two different answers in similar words."""
