"""Answers of a given form: which tokens may come next.

    StructuredOutputsParams --GrammarCompiler--> Grammar --start--> Matcher --mask--> ranks
                                                                      ^                 |
                                                                      +---- accept -----+

The library behind it, llguidance, is imported when the first request asks for a form.
"""
