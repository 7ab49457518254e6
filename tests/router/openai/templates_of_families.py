"""Small templates in the forms of the families: what a model is shown of tools, calls, results and thoughts."""

LLAMA = """{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>' }}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ (call.arguments | tojson) ~ '}' }}
{%- else %}{{- message.content }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"""

_MISTRAL = """{{- '<s>' }}
{%- for tool in tools or [] %}{{- '[AVAILABLE_TOOLS]' ~ (tool | tojson) }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if message.tool_call_id is undefined or message.tool_call_id | length != 9 %}
{{- raise_exception('a call has an id of nine characters') }}{% endif %}
{{- '[TOOL_RESULTS]' ~ message.tool_call_id ~ message.content }}
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('a call has an id of nine characters') }}{% endif %}
CALL
{%- endfor %}{{- '</s>' }}
{%- else %}{{- '[INST]' ~ message.content ~ '[/INST]' }}{% endif %}
{%- endfor %}"""
MISTRAL = _MISTRAL.replace(
    "CALL\n",
    """{{- '[TOOL_CALLS][{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) }}
{{- ', "id": "' ~ call.id ~ '"}]' }}\n""",
)
MISTRAL_ARGS = _MISTRAL.replace(
    "CALL\n",
    "{{- '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ (call.function.arguments | tojson) }}\n",
)
MAGISTRAL = MISTRAL_ARGS + "{# [THINK] [/THINK] #}"

_CHATML = """{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
HERMES = _CHATML
QWEN_THINKING = _CHATML + "{%- if add_generation_prompt %}{{- '<think>\\n' }}{% endif %}"
R1 = (
    _CHATML.replace("message.content }}", "(message.content or '').split('</think>')[-1] }}")
    + "{%- if add_generation_prompt and opens %}{{- '<think>\\n' }}{% endif %}"
)

GLM = """{{- '[gMASK]<sop>' }}
{%- for tool in tools or [] %}{{- '<|system|>' ~ (tool | tojson) }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|observation|>\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
{%- elif message.role == 'assistant' %}{{- '<|assistant|>\\n<think>' ~ (message.reasoning_content or '') ~ '</think>' }}
{%- if message.content %}{{- '\\n' ~ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>' ~ call.function.name ~ '\\n' }}
{%- for key, value in call.function.arguments.items() %}{{- '<arg_key>' ~ key ~ '</arg_key>\\n' }}
{{- '<arg_value>' ~ (value if value is string else value | tojson) ~ '</arg_value>\\n' }}
{%- endfor %}{{- '</tool_call>' }}
{%- endfor %}
{%- else %}{{- '<|' ~ message.role ~ '|>\\n' ~ message.content }}
{{- '/nothink' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{{- '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"""

# Arguments are added to a text, and calls are written where there is no content, as published templates do.
_DEEPSEEK = """{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- for message in messages %}
{%- if message['role'] == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
{%- elif message['role'] == 'assistant' and message['content'] is none %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for tool in message['tool_calls'] %}
CALL
{%- endfor %}{{- '<｜tool▁calls▁end｜><eos>' }}
{%- elif message['role'] == 'assistant' %}{{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<eos>' }}
{%- else %}{{- '<｜User｜>' + message['content'] }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' ~ OPENS }}{% endif %}"""
DEEPSEEK_V3 = _DEEPSEEK.replace("OPENS", "''").replace(
    "CALL\n",
    """{{- '' if loop.first else '\\n' }}{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}
{{- tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}\n""",
)
DEEPSEEK_R1 = DEEPSEEK_V3.replace("'<｜Assistant｜>' ~ ''", "'<｜Assistant｜><think>\\n'")
DEEPSEEK_V31 = _DEEPSEEK.replace("OPENS", "('<think>' if thinking else '</think>')").replace(
    "CALL\n",
    """{{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] }}
{{- '<｜tool▁call▁end｜>' }}\n""",
)

KIMI = """{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- for message in messages %}
{{- '<|im_' ~ message.role ~ '|>' }}
{%- if message.role == 'tool' %}{{- '## Return of ' ~ message.tool_call_id ~ '\\n' }}{% endif %}
{{- message.content or '' }}
{%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}
{%- for call in message.tool_calls %}
{{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor %}{{- '<|tool_calls_section_end|>' }}{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>' }}{% endif %}"""

QWEN35 = """{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
{%- for key, value in call.function.arguments | items %}{{- '<parameter=' ~ key ~ '>\\n' }}
{%- set is_plain = value is string or (value is not mapping and value is not sequence) %}
{{- (value | string if is_plain else value | tojson) ~ '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
