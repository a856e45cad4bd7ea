"""Which rank is this, and how do ranks find, tell and miss each other?"""
