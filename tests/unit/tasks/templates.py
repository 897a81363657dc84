"""Chat templates with the constructs of published models, written anew and small for these tests: none is a copy.

Each is named after the family whose constructs it uses: how it opens and closes turns, what it asks of its variables, which
filters, tests, loops and macros it needs.
"""

TEMPLATES = {
    # ChatML: namespace, reversed slices of messages, `is string`, split on </think>, enable_thinking with `is defined`, tojson.
    "qwen3": """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=messages|length - 1, looking=true) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.looking and message.role == 'user' and message.content is string %}
{%- set ns.looking = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content or '' %}{%- set thought = '' %}
{%- if '</think>' in content %}{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
{%- if message.tool_calls %}{%- for call in message.tool_calls %}{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}""",
    # A macro with a mutable default, `is mapping`, items(), dictsort, join, tools as XML, `| string`.
    "qwen3-coder": """{% macro extra(thing, known=[]) %}{%- for key, value in thing | dictsort if key not in known %}
{{- '\\n<' ~ key ~ '>' ~ (value | tojson if value is mapping or (value is iterable and value is not string) else value | string) }}
{{- '</' ~ key ~ '>' }}{%- endfor %}{% endmacro %}
{%- if messages[0]['role'] == 'system' %}{%- set system, rest = messages[0]['content'], messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- if tools is iterable and tools | length > 0 %}{{- '<|im_start|>system\\n' ~ (system | default('You are a helper.')) }}
{%- for tool in tools %}{%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
{{- '\\n<function>\\n<name>' ~ tool.name ~ '</name>' }}{%- if tool.parameters is mapping %}
{%- for name, fields in tool.parameters.properties | items %}{{- '\\n<parameter>' ~ name }}{{- extra(fields, ['type']) }}
{{- '</parameter>' }}{%- endfor %}{%- endif %}{{- '\\n</function>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif system is defined %}{{- '<|im_start|>system\\n' ~ system ~ '<|im_end|>\\n' }}{%- endif %}
{%- for message in rest %}
{%- if message.role == 'assistant' and message.tool_calls is defined and message.tool_calls is iterable %}
{{- '<|im_start|>assistant' }}{%- if message.content is string and message.content | trim | length > 0 %}
{{- '\\n' ~ message.content | trim ~ '\\n' }}{%- endif %}
{%- for call in message.tool_calls %}{%- set call = call.function %}{{- '\\n<tool_call>\\n<function=' ~ call.name ~ '>\\n' }}
{%- for name, value in call.arguments | items %}{{- '<parameter=' ~ name ~ '>\\n' }}
{%- set value = value | tojson | safe if value is mapping else value | string %}{{- value ~ '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>\\n<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') ~ '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    # Several flags in one namespace, bos_token by name, `is not none`, full-width bars in the markers.
    "deepseek-v3": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(first=true, tool=false, system='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system = ns.system + ('' if ns.first else '\\n\\n') + message['content'] %}{%- set ns.first = false %}{%- endif %}
{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.tool = false %}{{'<｜User｜>' + message['content']}}
{%- endif %}{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
{%- for call in message['tool_calls'] %}
{{- '<｜Assistant｜>' if loop.first and message['content'] is none else '' }}{{ message['content'] or '' }}
{{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '\\n```json\\n' + (call['function']['arguments'] | tojson) + '\\n```' }}
{%- endfor %}{{ eos_token }}{%- elif message['role'] == 'assistant' and message['content'] is not none %}
{%- if ns.tool %}{{ message['content'] }}{%- else %}{{ '<｜Assistant｜>' + message['content'] }}{%- endif %}{{ eos_token }}
{%- set ns.tool = false %}{%- endif %}{%- if message['role'] == 'tool' %}{%- set ns.tool = true %}
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor -%}
{% if add_generation_prompt and not ns.tool %}{{ '<｜Assistant｜>' }}{% endif %}""",
    # The thought of earlier answers is cut, the opening of the answer begins one.
    "deepseek-r1": """{{ bos_token }}{%- for message in messages %}{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}{%- set content = message.content or '' %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- else %}{{- message.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}""",
    # `tools` may be none and is dumped with separators; a default system message; a macro per message.
    "kimi-k2": """{% macro content(message) -%}{% if message['content'] is string %}{{ message['content'] }}
{%- elif message['content'] is not none %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}
{%- endmacro -%}
{% if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{% for message in messages -%}{%- if loop.first and messages[0]['role'] != 'system' -%}
<|im_system|>system<|im_middle|>You help.<|im_end|>{%- endif -%}
{%- set name = message.get('name', message['role']) -%}
{%- if message['role'] == 'user' -%}<|im_user|>{{ name }}<|im_middle|>
{%- elif message['role'] == 'assistant' -%}<|im_assistant|>{{ name }}<|im_middle|>
{%- else -%}<|im_system|>{{ name }}<|im_middle|>{%- endif -%}
{%- if message['role'] == 'assistant' and message.get('tool_calls') -%}{{ content(message) }}<|tool_calls_section_begin|>
{%- for call in message['tool_calls'] -%}<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
{%- if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}{% else -%}
{{ call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>{%- endfor -%}<|tool_calls_section_end|>
{%- elif message['role'] == 'tool' -%}## Return of {{ message.get('tool_call_id') }}\n{{ content(message) }}
{%- else -%}{{ content(message) }}{%- endif -%}<|im_end|>{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}""",
    # No token closes an answer: the next role's marker does. tojson with ensure_ascii.
    "glm-4.5": """[gMASK]<sop>{%- if tools -%}<|system|>\n# Tools{% for tool in tools %}\n{{ tool | tojson(ensure_ascii=False) }}{% endfor %}
{%- endif -%}
{%- macro visible(content) -%}{%- if content is string -%}{{ content }}
{%- elif content is iterable and content is not mapping -%}{%- for item in content -%}
{%- if item is mapping and item.type == 'text' -%}{{ item.text }}{%- elif item is string -%}{{ item }}{%- endif -%}{%- endfor -%}
{%- else -%}{{ content }}{%- endif -%}{%- endmacro -%}
{%- for m in messages %}{%- if m.role == 'user' -%}<|user|>\n{{ visible(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible(m.content).endswith('/nothink')) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>\n<think></think>{%- if m.content %}{{ '\\n' + visible(m.content).strip() }}{%- endif -%}
{%- if m.tool_calls -%}{% for tc in m.tool_calls %}{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\\n<tool_call>' + tc.name }}{% set args = tc.arguments %}{% for k, v in args.items() %}
<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}
</tool_call>{% endfor %}{%- endif -%}
{%- elif m.role == 'tool' -%}{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + visible(m.content) + '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>\n{{ visible(m.content) }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}""",
    # Roles have to take turns, else it raises; the system message goes into the first question.
    "mixtral": """{{ bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] ~ '\\n\\n' %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set system, loop_messages = '', messages %}{%- endif %}
{%- set ns = namespace(index=0) %}{%- for message in loop_messages %}
{%- if not (message.role == 'tool' or message.tool_calls is defined) %}{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}
{%- for message in loop_messages %}{%- if message.role == 'user' %}
{%- if loop.last and tools is not none %}{{- '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- ' [INST] ' ~ (system if loop.first else '') ~ message.content ~ ' [/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{{- call.function | tojson }}{{- ', ' if not loop.last else ']' ~ eos_token }}{%- endfor %}
{%- elif message.role == 'assistant' %}{{- ' ' ~ message.content | trim ~ eos_token }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' ~ message.content | tojson ~ '}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('only user and assistant roles, not ' ~ message.role) }}{%- endif %}{%- endfor %}""",
    # The date by strftime_now where none is given, tools with an indent, variables that may be undefined.
    "llama-3.1": """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: ' + date_string + '\\n\\n' + system_message + '<|eot_id|>' }}
{%- if tools_in_user_message and not tools is none %}{%- if messages | length != 0 %}
{%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{{- raise_exception('no first message') }}{%- endif %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{{- first + '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}{%- if not (message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}{%- if not message.tool_calls | length == 1 %}{{- raise_exception('single tool calls only') }}
{%- endif %}{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}
{%- endif %}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    # Channels; tools as TypeScript by a macro that recurses; the date; an answer's end differs where it is the last message.
    "gpt-oss": """{%- macro kind(spec) -%}{%- if spec.type == 'array' -%}{{ kind(spec['items']) }}[]
{%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join(' | ') }}
{%- elif spec.enum -%}"{{ spec.enum | join('" | "') }}"
{%- elif spec.type in ['integer', 'number'] -%}number{%- else -%}{{ spec.type | default('any') }}{%- endif -%}{%- endmacro -%}
{{- '<|start|>system<|message|>You are a model.\\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\\n\\nReasoning: ' }}
{{- (reasoning_effort | default('medium')) + '\\n<|end|>' }}
{%- if messages[0].role in ['developer', 'system'] %}{%- set developer = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set developer = '' %}{%- set rest = messages %}{%- endif %}
{%- if developer or tools %}{{- '<|start|>developer<|message|>' + developer }}{%- if tools %}{{- '\\nnamespace functions {' }}
{%- for tool in tools %}{%- set tool = tool.function %}{{- '\\ntype ' + tool.name + ' = (_: {' }}
{%- for name, spec in tool.parameters.properties.items() %}{{- ' ' + name }}
{{- '?' if name not in (tool.parameters.required or []) else '' }}{{- ': ' + kind(spec) + ',' }}{%- endfor %}{{- ' }) => any;' }}
{%- endfor %}{{- '\\n}' }}{%- endif %}{{- '<|end|>' }}{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in rest -%}
{%- if message.role == 'assistant' -%}{%- if 'tool_calls' in message -%}{%- set call = message.tool_calls[0].function -%}
{%- set last_call.name = call.name -%}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + call.arguments|tojson + '<|call|>' }}
{%- elif loop.last and not add_generation_prompt -%}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else -%}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif -%}
{%- elif message.role == 'tool' -%}{%- if last_call.name is none -%}{{- raise_exception('a tool answers without a call') }}{%- endif -%}
{{- '<|start|>functions.' + last_call.name + ' to=assistant<|channel|>commentary<|message|>' + message.content|tojson + '<|end|>' }}
{%- else -%}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}""",
    # {% generation %} around what is trained on; enable_thinking set by a flag within the system message; loop controls.
    "smollm3": """{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = '/think' if enable_thinking else '/no_think' -%}
{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content -%}
{%- if '/no_think' in system -%}{%- set mode = '/no_think' -%}{%- endif -%}
{%- set own = system.replace('/no_think', '').replace('/think', '').rstrip() -%}{%- endif -%}
{{- '<|im_start|>system\\nToday Date: ' ~ strftime_now('%d %B %Y') ~ '\\nMode: ' ~ mode ~ '\\n' ~ (own | default('')) -}}
{%- if tools -%}{{- '\\n' -}}{%- for tool in tools -%}{{- tool | string -}}{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}{%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
{%- set content = message.content if message.content is string else '' -%}
{%- if message.role == 'user' -%}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' -%}
{% generation %}
{%- if mode == '/think' -%}{{ '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}
{%- else -%}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}{%- endif -%}
{% endgeneration %}
{%- elif message.role == 'tool' -%}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{%- endif -%}
{%- if loop.index0 > 200 -%}{%- break -%}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- if mode == '/no_think' -%}{{ '<think>\\n\\n</think>\\n' }}{%- endif -%}
{%- endif -%}""",
    # documents; the model's role has another name; content may be a list of parts.
    "gemma-like": """{{ bos_token }}{%- if documents %}{{- '<start_of_turn>user\\nDocuments:' }}{%- for document in documents %}
{{- '\\n[' ~ loop.index ~ '] ' ~ document.title ~ ': ' ~ document.text }}{%- endfor %}{{- '<end_of_turn>\\n' }}{%- endif %}
{%- if messages[0]['role'] == 'system' -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}
{{ item['text'] | trim if item['type'] == 'text' else '<image>' }}{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}""",
    # tools is asked for by `is not none` and piped through filters at once; sort, map, selectattr, sort_keys.
    "asks-whether-none": """{%- if tools is not none %}{{- '<tools>' ~ (tools | map(attribute='function') | list | tojson(sort_keys=true)) }}
{%- endif %}{%- if documents is not none and documents %}{{- documents | map(attribute='title') | sort | join(', ') }}{%- endif %}
{%- for message in messages | selectattr('role', 'in', ['user', 'assistant', 'tool']) %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content | default('', true) | trim | upper) ~ '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
}  # fmt: skip
